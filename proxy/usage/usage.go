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
	Verb, Subresource, Namespace, Name string
	// Code of the response, and its size in bytes; 0 for a watch.
	Code, Bytes int
	// Sent is when it was sent to the apiserver.
	Sent time.Time
	// Own: it is in the namespace of the pod.
	Own bool
	// Indivisible: it lists or watches in encodings of which the mesh can divide none.
	Indivisible bool
}

// Log counts the requests of one pod. Its zero value is ready to use, and it is safe for concurrent use.
type Log struct {
	mu                           sync.Mutex
	since, last                  time.Time
	requests, forbidden          uint64
	resources                    map[schema.GroupResource]*resource
	namespaces, objects, crossed int // of all resources
	causes                       causes
}

// resource is what the pod requested of one resource.
type resource struct {
	all, indivisible                               bool
	reads, writes, conflicts, other, bytes, events uint64
	namespaces                                     map[string]*written
	objects                                        map[object]uint64
	cross                                          map[cross]uint64
}

type object struct{ namespace, name string }

// written are the writes in a namespace.
type written struct {
	n    uint64
	last time.Time
}

// cross is a namespace, and the resource whose changes in others seem to cause writes there.
type cross struct {
	namespace string
	cause     schema.GroupResource
}

// maxName bounds the names that are kept, in bytes. Those of objects are not longer; an aggregated apiserver answers
// requests for any.
const maxName = 253

// succeeded reports whether the request had success, and names that can be kept.
func (r *Request) succeeded() bool {
	return (r.Code/100 == 2 || r.Code == http.StatusSwitchingProtocols) &&
		max(len(r.Group), len(r.Resource), len(r.Namespace), len(r.Name)) <= maxName
}

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
	success := r.succeeded()
	of := l.resource(r.GroupResource, success)
	if of != nil {
		of.bytes += uint64(r.Bytes)
		of.indivisible = of.indivisible || r.Indivisible
	}
	switch {
	case of == nil:
	case r.Verb == "get" || r.Verb == "list" || r.Verb == "watch":
		of.reads++
		of.all = of.all || success && r.Verb != "get" && r.Namespace == "" && r.Name == ""
	case r.Code == http.StatusConflict:
		of.conflicts++
	case success:
		l.wrote(of, r, now)
	}
}

// Event counts an event of a watch about an object in a namespace, which is empty for objects in none. It keeps of.
func (l *Log) Event(of schema.GroupResource, namespace []byte, now time.Time) {
	if max(len(of.Group), len(of.Resource), len(namespace)) > maxName {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.resource(of, true)
	if r == nil {
		return
	}
	r.events++
	if w := r.namespaces[string(namespace)]; w == nil || now.Sub(w.last) >= soon { // else the pod wrote it
		l.causes.note(of, namespace, now)
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
	r := &resource{namespaces: map[string]*written{}, objects: map[object]uint64{}, cross: map[cross]uint64{}}
	l.resources[schema.GroupResource{Group: strings.Clone(of.Group), Resource: strings.Clone(of.Resource)}] = r
	return r
}

// wrote counts a successful write. l.mu is held.
func (l *Log) wrote(of *resource, r *Request, now time.Time) {
	of.writes++
	if w := of.namespaces[r.Namespace]; w != nil {
		w.n, w.last = w.n+1, now
	} else if l.namespaces < meshv1.MaxUsageNamespaces {
		of.namespaces[strings.Clone(r.Namespace)] = &written{1, now}
		l.namespaces++
	} else {
		of.other++
	}
	l.crosses(of, r)
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

// crosses counts a write that a change in another namespace seems to have caused. A status is of an object that
// the pod reconciles, in its own time. l.mu is held.
func (l *Log) crosses(of *resource, r *Request) {
	if r.Own || r.Namespace == "" || r.Subresource == "status" {
		return
	}
	cause, ok := l.causes.elsewhere(r.Namespace, r.Sent)
	if !ok {
		return
	}
	key := cross{r.Namespace, cause}
	if n, known := of.cross[key]; known {
		of.cross[key] = n + 1
	} else if l.crossed < meshv1.MaxUsageCross {
		key.namespace = strings.Clone(key.namespace)
		of.cross[key] = 1
		l.crossed++
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
	out := &meshv1.ResourceUsage{
		Group: of.Group, Resource: of.Resource, All: r.all, Indivisible: r.indivisible, Bytes: r.bytes, Events: r.events,
		Reads: r.reads, Writes: r.writes, Conflicts: r.conflicts, OtherWrites: r.other,
	}
	for namespace, w := range r.namespaces {
		out.Namespaces = append(out.Namespaces, &meshv1.NamespaceWrites{Namespace: namespace, Writes: w.n})
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
	for c, n := range r.cross {
		out.Cross = append(out.Cross, &meshv1.CrossWrites{Namespace: c.namespace, CauseGroup: c.cause.Group, CauseResource: c.cause.Resource, Writes: n})
	}
	slices.SortFunc(out.Cross, func(a, b *meshv1.CrossWrites) int {
		return cmp.Or(strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetCauseGroup(), b.GetCauseGroup()), strings.Compare(a.GetCauseResource(), b.GetCauseResource()))
	})
	return out
}
