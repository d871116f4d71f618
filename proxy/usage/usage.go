// Package usage counts what a pod requests, by resource and namespace, so that the owner of an operator
// learns whether it can be divided. All of it is bounded per pod.
package usage

import (
	"cmp"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Request is a request for a resource that the apiserver has answered.
type Request struct {
	schema.GroupResource
	Verb, Namespace, Name string
	// Code of the response.
	Code int
	// Own: it is in the namespace of the pod.
	Own bool
}

// Log counts the requests of one pod. Its zero value is ready to use, and it is safe for concurrent use.
type Log struct {
	mu                  sync.Mutex
	since, last         time.Time
	requests, forbidden uint64
	resources           map[schema.GroupResource]*resource
	namespaces, objects int // of all resources
}

// resource is what the pod requested of one resource.
type resource struct {
	all                             bool
	reads, writes, conflicts, other uint64
	namespaces                      map[string]uint64
	objects                         map[object]uint64
}

type object struct{ namespace, name string }

// leases are counted by name in all namespaces, because most are locks.
var leases = schema.GroupResource{Group: "coordination.k8s.io", Resource: "leases"}

// Add counts a request. It counts a watch when that begins.
func (l *Log) Add(r *Request, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.since.IsZero() {
		l.since = now
	}
	l.last = now
	l.requests++
	if r.Code == http.StatusForbidden {
		l.forbidden++
	}
	success := r.Code/100 == 2 || r.Code == http.StatusSwitchingProtocols
	of := l.resource(r.GroupResource, success)
	switch {
	case of == nil:
	case r.Verb == "get" || r.Verb == "list" || r.Verb == "watch":
		of.reads++
		of.all = of.all || success && r.Verb != "get" && r.Namespace == "" && r.Name == ""
	case r.Code == http.StatusConflict:
		of.conflicts++
	case success:
		l.wrote(of, r)
	}
}

// resource returns what was requested of a resource; nil if it is not known, and not to be. l.mu is held.
func (l *Log) resource(of schema.GroupResource, success bool) *resource {
	if r := l.resources[of]; r != nil || !success || len(l.resources) >= meshv1.MaxUsageResources {
		return r
	}
	if l.resources == nil {
		l.resources = map[schema.GroupResource]*resource{}
	}
	r := &resource{namespaces: map[string]uint64{}, objects: map[object]uint64{}}
	l.resources[schema.GroupResource{Group: strings.Clone(of.Group), Resource: strings.Clone(of.Resource)}] = r
	return r
}

// wrote counts a successful write. l.mu is held.
func (l *Log) wrote(of *resource, r *Request) {
	of.writes++
	if n, known := of.namespaces[r.Namespace]; known {
		of.namespaces[r.Namespace] = n + 1
	} else if l.namespaces < meshv1.MaxUsageNamespaces {
		of.namespaces[strings.Clone(r.Namespace)] = 1
		l.namespaces++
	} else {
		of.other++
	}
	if r.Name == "" || !r.Own && r.GroupResource != leases {
		return
	}
	if n, known := of.objects[object{r.Namespace, r.Name}]; known {
		of.objects[object{r.Namespace, r.Name}] = n + 1
	} else if l.objects < meshv1.MaxUsageObjects {
		of.objects[object{strings.Clone(r.Namespace), strings.Clone(r.Name)}] = 1
		l.objects++
	}
}

// Report returns the counts; nil before the first request.
func (l *Log) Report() *meshv1.Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.requests == 0 {
		return nil
	}
	out := &meshv1.Usage{SinceMs: l.since.UnixMilli(), LastMs: l.last.UnixMilli(), Requests: l.requests, Forbidden: l.forbidden}
	for of, r := range l.resources {
		out.Resources = append(out.Resources, r.report(of))
	}
	slices.SortFunc(out.Resources, func(a, b *meshv1.ResourceUsage) int {
		return cmp.Or(strings.Compare(a.GetGroup(), b.GetGroup()), strings.Compare(a.GetResource(), b.GetResource()))
	})
	return out
}

func (r *resource) report(of schema.GroupResource) *meshv1.ResourceUsage {
	out := &meshv1.ResourceUsage{Group: of.Group, Resource: of.Resource, All: r.all, Reads: r.reads, Writes: r.writes, Conflicts: r.conflicts, OtherWrites: r.other}
	for namespace, n := range r.namespaces {
		out.Namespaces = append(out.Namespaces, &meshv1.NamespaceWrites{Namespace: namespace, Writes: n})
	}
	slices.SortFunc(out.Namespaces, func(a, b *meshv1.NamespaceWrites) int {
		return strings.Compare(a.GetNamespace(), b.GetNamespace())
	})
	for o, n := range r.objects {
		out.Objects = append(out.Objects, &meshv1.ObjectWrites{Namespace: o.namespace, Name: o.name, Writes: n})
	}
	slices.SortFunc(out.Objects, func(a, b *meshv1.ObjectWrites) int {
		return cmp.Or(strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetName(), b.GetName()))
	})
	return out
}
