// Package advise decides from the requests of an operator whether it can be divided. It is pure.
//
//	profile.go  what the operator does, by resource
//	evaluate.go the verdict, and what to know before the operator is divided
package advise

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
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
	// Events are those of watches about objects, and Bytes those of the responses to other requests.
	Events, Bytes int
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
	// namespaces have the writes by namespace, and objects those with known names. others are writes in
	// namespaces that are not known by name.
	namespaces map[string]int
	others     int
	objects    map[object]int
	// indivisible: they listed or watched it in encodings that the mesh cannot divide.
	indivisible bool
	// cross are the writes that changes in other namespaces seem to have caused.
	cross map[cross]int
}

// cross is a namespace, and the resource whose changes in others seem to cause writes there.
type cross struct {
	namespace string
	cause     schema.GroupResource
}

// object is an object of a resource.
type object struct{ namespace, name string }

var writes = []string{"create", "update", "patch", "delete", "deletecollection"}

// Add adds a request to the apiserver. A watch counts when it begins.
func (p *Profile) Add(l tap.Line) {
	if l.Resource == "" || l.Verb == "watch" && !l.Begins() {
		return
	}
	p.seen(l.Pod, l.Time, l.Time)
	p.Requests++
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

// Record adds what the manager recorded.
func (p *Profile) Record(of *meshv1.WorkloadUsage) {
	for _, pod := range of.GetPods() {
		is := pod.GetUsage()
		p.seen(pod.GetName(), time.UnixMilli(is.GetSinceMs()), time.UnixMilli(is.GetLastMs()))
		p.Requests += int(is.GetRequests())
		p.Refused += int(is.GetForbidden())
		for _, r := range is.GetResources() {
			p.Events += int(r.GetEvents())
			p.Bytes += int(r.GetBytes())
			if u := p.of(schema.GroupResource{Group: r.GetGroup(), Resource: r.GetResource()}); u != nil {
				u.record(r)
			}
		}
	}
}

// seen notes that a pod sent requests, from one time to another.
func (p *Profile) seen(pod string, first, last time.Time) {
	if p.First.IsZero() || first.Before(p.First) {
		p.First = first
	}
	if last.After(p.Last) {
		p.Last = last
	}
	if p.Pods == nil {
		p.Pods, p.uses = map[string]bool{}, map[schema.GroupResource]*use{}
	}
	p.Pods[pod] = true
}

// of returns what the pods did with a resource; nil if there is no room.
func (p *Profile) of(r schema.GroupResource) *use {
	if p.uses[r] == nil && len(p.uses) < maxResources {
		p.uses[r] = &use{namespaces: map[string]int{}, objects: map[object]int{}, cross: map[cross]int{}}
	}
	return p.uses[r]
}

func (u *use) record(r *meshv1.ResourceUsage) {
	u.wide = u.wide || r.GetAll()
	u.writes += int(r.GetWrites())
	u.conflicts += int(r.GetConflicts())
	u.others += int(r.GetOtherWrites())
	u.indivisible = u.indivisible || r.GetIndivisible()
	for _, n := range r.GetNamespaces() {
		if !count(u.namespaces, n.GetNamespace(), int(n.GetWrites())) {
			u.others += int(n.GetWrites())
		}
	}
	for _, o := range r.GetObjects() {
		count(u.objects, object{o.GetNamespace(), o.GetName()}, int(o.GetWrites()))
	}
	for _, c := range r.GetCross() {
		count(u.cross, cross{c.GetNamespace(), schema.GroupResource{Group: c.GetCauseGroup(), Resource: c.GetCauseResource()}}, int(c.GetWrites()))
	}
}

func (u *use) write(l tap.Line) {
	switch {
	case l.Code == 409:
		u.conflicts++
	case l.Code/100 == 2:
		u.writes++
		if !count(u.namespaces, l.Namespace, 1) {
			u.others++
		}
		if l.Name != "" {
			count(u.objects, object{l.Namespace, l.Name}, 1)
		}
	}
}

// beyond reports whether objects were written in other namespaces than one.
func (u *use) beyond(namespace string) bool {
	_, in := u.namespaces[namespace]
	return u.others > 0 || len(u.namespaces) > 1 || len(u.namespaces) == 1 && !in
}

// crossing returns how many writes in a namespace changes in others seem to have caused, and of what.
func (u *use) crossing(namespace string) (writes int, causes []string) {
	for c, n := range u.cross {
		if c.namespace == namespace {
			writes += n
			causes = append(causes, c.cause.String())
		}
	}
	return writes, causes
}

// count counts n for a key. It returns false if there is no room for it.
func count[K comparable](of map[K]int, key K, n int) bool {
	_, known := of[key]
	if !known && len(of) >= maxKeys {
		return false
	}
	of[key] += n
	return true
}
