// Package advise judges from the requests of an operator whether it can be divided. It is pure.
//
//	profile.go  what the operator does, by resource
//	judge.go    the verdict, and what to know before the operator is divided
package advise

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/tap"
)

const (
	// maxResources bounds the resources of a profile, and maxKeys the namespaces and the objects of each.
	maxResources = 256
	maxKeys      = 10_000
)

// Profile is what the pods of an operator did.
type Profile struct {
	// First and Last are the times of the first and the last request.
	First, Last time.Time
	Requests    int
	// Refused are the requests that the apiserver answered with 403.
	Refused int
	// Pods are those that sent requests.
	Pods map[string]bool

	uses map[schema.GroupResource]*use
}

// use is what the pods did with the objects of a resource.
type use struct {
	// wide: they listed or watched the objects of all namespaces, or those without any.
	wide bool
	// writes are those that the apiserver accepted, conflicts those that it refused with 409.
	writes, conflicts int
	// namespaces have the writes by namespace, and objects those with known names.
	namespaces map[string]int
	objects    map[object]int
}

// object is an object of a resource.
type object struct{ namespace, name string }

var writes = []string{"create", "update", "patch", "delete", "deletecollection"}

// Add adds a request to the apiserver. A watch counts when it begins.
func (p *Profile) Add(l tap.Line) {
	if l.Resource == "" || l.Verb == "watch" && !l.Begins() {
		return
	}
	if p.First.IsZero() || l.Time.Before(p.First) {
		p.First = l.Time
	}
	if l.Time.After(p.Last) {
		p.Last = l.Time
	}
	p.Requests++
	if p.Pods == nil {
		p.Pods, p.uses = map[string]bool{}, map[schema.GroupResource]*use{}
	}
	p.Pods[l.Pod] = true
	u := p.of(schema.GroupResource{Group: l.Group, Resource: l.Resource})
	switch {
	case l.Code == 403:
		p.Refused++
	case u == nil:
	case slices.Contains(writes, l.Verb):
		u.write(l)
	case (l.Verb == "list" || l.Verb == "watch") && l.Namespace == "" && l.Name == "":
		u.wide = true
	}
}

// of returns what the pods did with a resource; nil if there is no room.
func (p *Profile) of(r schema.GroupResource) *use {
	if p.uses[r] == nil && len(p.uses) < maxResources {
		p.uses[r] = &use{namespaces: map[string]int{}, objects: map[object]int{}}
	}
	return p.uses[r]
}

func (u *use) write(l tap.Line) {
	switch {
	case l.Code == 409:
		u.conflicts++
	case l.Code/100 == 2:
		u.writes++
		count(u.namespaces, l.Namespace)
		if l.Name != "" {
			count(u.objects, object{l.Namespace, l.Name})
		}
	}
}

// beyond reports whether objects were written in other namespaces than one.
func (u *use) beyond(namespace string) bool {
	_, in := u.namespaces[namespace]
	return len(u.namespaces) > 1 || len(u.namespaces) == 1 && !in
}

// count counts a key, if there is room for it.
func count[K comparable](of map[K]int, key K) {
	if _, known := of[key]; known || len(of) < maxKeys {
		of[key]++
	}
}
