package activity

import (
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Counter counts the requests of one plan. The resource is looked up by the first that the
// apiserver answers with success.
type Counter struct {
	log      *Log
	kind     kind
	resource atomic.Pointer[Resource]
}

// Counter returns a counter for a resource that the policy divides, or does not.
func (l *Log) Counter(res schema.GroupResource, divided bool) *Counter {
	return &Counter{log: l, kind: kind{res, divided}}
}

// Write counts a write. The key is that of what was written, 0 if it is not known.
func (c *Counter) Write(key uint64, foreign bool) {
	r := c.counts(true)
	if r == nil {
		return
	}
	p := &r.periods[r.present.Load()]
	p.writes.Add(1)
	if foreign {
		p.foreign.Add(1)
	}
	if key != 0 {
		p.keys.add(key)
	}
}

// Watch counts an open watch of all namespaces. It returns the function that ends it,
// nil if the watch does not count.
func (c *Counter) Watch() (over func()) {
	r := c.counts(false)
	if r == nil {
		return nil
	}
	r.watches.Add(1)
	return func() { r.watches.Add(-1) }
}

// counts returns the resource; nil if there is no room for it.
func (c *Counter) counts(written bool) *Resource {
	r := c.resource.Load()
	if r == nil || r.removed.Load() {
		r = c.log.resource(c.kind, written)
		c.resource.Store(r)
	}
	return r
}
