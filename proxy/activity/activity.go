// Package activity counts what a pod writes and watches, by resource, so that the manager
// finds resources that several shards write although their root does not divide them.
//
// All of it is bounded per pod. A resource is known by name only once the apiserver has
// answered a request for it with success.
package activity

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

const (
	// Grace is how long after a change of the division writes are left out: the client may
	// still work on what its shard owned before.
	Grace = 30 * time.Second
	// Period is how long counts are kept at least, and half of how long they are at most.
	Period = 30 * time.Minute
	// maxKnown bounds the resources that are counted. Those without writes make room for
	// others that are written.
	maxKnown = 64
)

// Log counts what one pod does. Its zero value is ready to use, and it is safe for concurrent
// use.
type Log struct {
	mu     sync.Mutex // not taken by a write whose resource and key are known
	known  map[kind]*Resource
	begins time.Time // counts from before are dropped
	begun  bool
	since  time.Time // of the period
}

// kind identifies a Resource. A change of the policy may divide the resource.
type kind struct {
	schema.GroupResource
	divided bool
}

// Resource is what a pod does to the objects of one resource.
type Resource struct {
	kind
	periods [2]period // the present one, and the one before
	present atomic.Uint32
	watches atomic.Int64 // open, in all namespaces
	removed atomic.Bool  // from the log
}

// period has the counts of one period.
type period struct {
	writes, foreign atomic.Uint64
	keys            keys
}

func (p *period) clear() {
	p.writes.Store(0)
	p.foreign.Store(0)
	p.keys.clear()
}

// Reset drops all counts when the division changes. Counting goes on after Grace.
func (l *Log) Reset(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begins, l.begun = now.Add(Grace), false
}

// resource returns the counts of a resource, which is written or watched; nil if there is no
// room.
func (l *Log) resource(k kind, written bool) *Resource {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.known[k]; r != nil {
		return r
	}
	if len(l.known) >= maxKnown && (!written || !l.makeRoom()) {
		return nil
	}
	if l.known == nil {
		l.known = map[kind]*Resource{}
	}
	k.Group, k.Resource = strings.Clone(k.Group), strings.Clone(k.Resource)
	r := &Resource{kind: k}
	l.known[k] = r
	return r
}

// makeRoom removes a resource that is only watched: operators may watch very many. l.mu is held.
func (l *Log) makeRoom() bool {
	for k, r := range l.known {
		if r.unwritten() {
			l.remove(k)
			return true
		}
	}
	return false
}

// remove removes a resource. Its counters look it up again. l.mu is held.
func (l *Log) remove(k kind) {
	l.known[k].removed.Store(true)
	delete(l.known, k)
}

// Report returns the activity of the last one or two periods, sorted by resource: of each
// kind, divided or not, the [meshv1.MaxActivity] resources with the most writes. It returns
// nothing during Grace.
func (l *Log) Report(now time.Time) (out []*meshv1.ResourceActivity) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Before(l.begins) {
		return nil
	}
	l.advance(now)
	for _, r := range l.known {
		if a := r.report(); a.GetWrites() > 0 || a.GetWatched() {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, func(a, b *meshv1.ResourceActivity) int {
		return cmp.Or(cmp.Compare(b.GetWrites(), a.GetWrites()), byName(a, b))
	})
	room := map[bool]int{false: meshv1.MaxActivity, true: meshv1.MaxActivity}
	out = slices.DeleteFunc(out, func(a *meshv1.ResourceActivity) bool {
		room[a.GetDivided()]--
		return room[a.GetDivided()] < 0
	})
	slices.SortFunc(out, byName)
	return out
}

func byName(a, b *meshv1.ResourceActivity) int {
	return cmp.Or(strings.Compare(a.GetGroup(), b.GetGroup()), strings.Compare(a.GetResource(), b.GetResource()))
}

// advance begins a period if the last one is over. l.mu is held.
func (l *Log) advance(now time.Time) {
	switch {
	case !l.begun:
		l.begun, l.since = true, now
		for _, r := range l.known {
			r.periods[0].clear()
			r.periods[1].clear()
		}
	case now.Sub(l.since) >= Period:
		l.since = now
		for _, r := range l.known {
			next := 1 - r.present.Load()
			r.periods[next].clear()
			r.present.Store(next)
		}
	default:
		return
	}
	for k, r := range l.known {
		if r.unwritten() && r.watches.Load() == 0 {
			l.remove(k)
		}
	}
}

// unwritten reports whether the pod has not written the resource lately.
func (r *Resource) unwritten() bool {
	return r.periods[0].writes.Load()+r.periods[1].writes.Load() == 0
}

func (r *Resource) report() *meshv1.ResourceActivity {
	a, b := &r.periods[0], &r.periods[1]
	return &meshv1.ResourceActivity{
		Group: r.Group, Resource: r.Resource, Divided: r.divided,
		Writes: a.writes.Load() + b.writes.Load(), ForeignWrites: a.foreign.Load() + b.foreign.Load(),
		Watched: r.watches.Load() > 0, Keys: sample.Merge(a.keys.list(), b.keys.list()),
	}
}
