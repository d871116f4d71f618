// Package relist records what the caches of a pod's clients have: which of them must be
// corrected after a policy change, what injected faults kept from them, and which resource
// versions they have seen.
package relist

import (
	"context"
	"errors"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Bounds limit the memory of a ledger, against pods that request many different paths.
type Bounds struct {
	Resources int
	Views     int // whose caches are remembered, of all resources
	Gaps      int // of all resources: watches that drop events, or did
	Awaited   int // views whose caches are awaited after a change
}

// ResumeWithin is how long after a change a cache may resume that had no watch open at the
// change. client-go resumes within a minute. A client that comes later has no cache from
// before, and one that still does not list cannot.
const ResumeWithin = 10 * time.Minute

func longAgo(changed time.Time) bool { return time.Since(changed) > ResumeWithin }

// Policy is what a ledger asks of a policy.
type Policy interface {
	// Affects reports whether clients get other objects of a resource under next.
	Affects(next Policy, res Resource) bool
	// Redivides reports whether the pod owns other objects under next, or caches others.
	Redivides(next Policy) bool
	// KeepsCaches reports whether caches must not be made to list.
	KeepsCaches() bool
	// PassesThrough reports whether requests pass unseen.
	PassesThrough() bool
	// DropsEvents reports whether faults drop events from watches of a resource.
	DropsEvents(res Resource) bool
}

// Resource is a resource of a cluster; the name of that of the apiserver itself is empty.
type Resource struct {
	Cluster string
	schema.GroupResource
}

// overflow stands for all resources above Bounds.Resources. It is stale after any change.
var overflow = Resource{GroupResource: schema.GroupResource{Group: "*", Resource: "*"}}

// ErrPolicyChanged ends requests under a policy that is not in force any more.
var ErrPolicyChanged = errors.New("the policy changed")

// Ledger records which watches are open, and which of a client's caches may contain
// another set of objects than the policy in force gives.
//
// A cache that was filled under another scope must be filled again: a watch that resumes
// would miss the objects that the pod gained, and never delete those that it lost. So a
// change of the policy ends the watches of the resource. Each cache that resumes gets the
// difference as the first events of its watch, a supplement, if the ledger knows under which
// policies it was filled. Else it gets 410 once, so that it lists.
//
// One limitation remains: the ledger cannot distinguish two caches with identical requests
// (the same view). If one of them lists, the other may resume without a correction. The same
// holds if one had no watch open at the change, and resumes before the other.
type Ledger struct {
	Bounds Bounds

	mu      sync.Mutex
	policy  Policy    // in force
	changed time.Time // when it was applied
	// before is the policy under which caches of resources not seen yet were filled;
	// nil if that is unknown.
	before Policy
	// began is when the first policy came. An earlier proxy may have ended while the
	// faults of that policy dropped events from watches: the caches that these concern
	// must list once.
	began     time.Time
	inherited Policy
	resources map[Resource]*resource
	views     int // with caches, of all resources
	gaps      int // of all resources
	catchUp   catchUp
}

// NewLedger returns an empty Ledger.
func NewLedger() *Ledger {
	return &Ledger{
		Bounds:    Bounds{Resources: 2048, Views: 1 << 14, Gaps: 1 << 10, Awaited: 1 << 10},
		resources: map[Resource]*resource{},
	}
}

type resource struct {
	changed time.Time // when the set of objects changed
	doubted time.Time // since when it is unknown what its caches miss
	open    map[*watch]struct{}
	caches  map[View]*caches // since changed; those of a view that is not here must list
	gaps    []*Gap
}

// kept reports whether its caches must not be made to list.
func (s *resource) kept(p Policy) bool { return p.KeepsCaches() && longAgo(s.doubted) }

// Doubtful reports whether a cache must list only because it is unknown what it misses.
func (t *Ticket) Doubtful(under Policy) bool {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	s := t.state
	return !longAgo(s.doubted) && (under.KeepsCaches() || s.changed.Equal(s.doubted))
}

// Gap is what faults kept from a watch's client, for as long as the watch lasts and, if
// it misses something then, until the client has listed. Policies do not change it, so it
// applies whether caches are kept or not.
type Gap struct {
	events.Gap
	view View
	sent bool      // a client that would have missed it was made to list
	over time.Time // when the watch ended; zero: it has not
}

func (g *Gap) isOver() bool { return !g.over.IsZero() }

// View identifies a cache of a client by a hash of its requests: the client controls how
// long and how many they are. Caches with identical requests cannot be distinguished.
type View struct {
	path, words, cluster uint64
	one                  bool // object, by its name
}

// Words of a list or watch that distinguish the caches of a client. Name is that of the one
// object it is about, or empty. Cluster is in the path, too.
type Words struct{ Cluster, Path, Labels, Fields, As, Agent, Name string }

var seed = maphash.MakeSeed()

// View returns the view of a request.
func (w Words) View() View {
	return View{maphash.String(seed, w.Path), maphash.Comparable(seed, w), maphash.String(seed, w.Cluster), w.Name != ""}
}

// watch is an open watch. end ends it cleanly.
type watch struct {
	view View
	end  context.CancelCauseFunc
	// filled means that the cache of its client was complete since the watch began.
	filled bool
	// unordered means that the cache may be ahead of the version from which it resumes.
	unordered bool
}

// Ticket is the entry of a list or watch in a ledger.
type Ticket struct {
	ledger  *Ledger
	state   *resource
	changed time.Time
	view    View
	watch   *watch
}

// Change puts a policy in force, which swap makes visible to requests, and ends the
// watches that it affects. Requests that enter the ledger afterwards find next. since is
// when the first policy was applied; later policies are applied now.
func (l *Ledger) Change(next Policy, since time.Time, swap func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.policy
	if old != nil && (old.Redivides(next) || l.resources[overflow] != nil) {
		l.catchUp.begin(old) // before requests find next
	}
	swap()
	l.policy = next
	if longAgo(l.changed) {
		l.before = old
	}
	l.changed = time.Now()
	if old == nil {
		l.began, l.inherited = l.changed, next
		if since.Before(l.changed) {
			l.changed = since
		}
	}
	for res, state := range l.resources {
		if old.PassesThrough() { // there are no resources before the first policy
			state.forgetPolicies()
		}
		if res == overflow || old.Affects(next, res) {
			l.expire(state, old, !state.kept(next))
		}
	}
}

// Renew puts a policy in force that equals the one before.
func (l *Ledger) Renew(next Policy, swap func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	swap()
	l.policy = next
}

// expire ends the watches of a resource, and if correct is true has its caches corrected.
func (l *Ledger) expire(s *resource, old Policy, correct bool) {
	open := map[View]bool{} // by view: whether a watch was unordered
	for w := range s.open {
		w.end(ErrPolicyChanged)
		open[w.view] = open[w.view] || w.unordered
	}
	for v, c := range s.caches {
		if _, resumes := open[v]; !correct || !c.lastsOver(resumes) {
			delete(s.caches, v)
			l.views--
		}
	}
	if correct {
		for v, unordered := range open {
			if c := l.cachesOf(s, v); c != nil {
				c.expire(old, unordered || old.KeepsCaches())
			}
		}
		l.owe(s)
	}
	s.changed = l.changed
	clear(s.open) // the next change may come before they have left
}

// owe counts and awaits the caches of a resource's open watches.
func (l *Ledger) owe(s *resource) {
	for w := range s.open {
		l.catchUp.await(w.view, w.filled, l.Bounds.Awaited)
		if c := s.caches[w.view]; c != nil {
			c.owed++
		}
	}
}

// cachesOf returns the caches of a view; nil if no more can be remembered.
func (l *Ledger) cachesOf(s *resource, v View) *caches {
	c := s.caches[v]
	if c == nil && l.views >= l.Bounds.Views {
		l.sweep()
	}
	if c == nil && l.views < l.Bounds.Views {
		c = &caches{since: time.Now()}
		s.caches[v] = c
		l.views++
	}
	return c
}

// sweep forgets caches that have resumed long ago.
func (l *Ledger) sweep() {
	for _, s := range l.resources {
		maps.DeleteFunc(s.caches, func(_ View, c *caches) bool {
			over := c.owed == 0 && longAgo(c.since)
			if over {
				l.views--
			}
			return over
		})
	}
}

// Enter returns the ticket of a list, or of a watch, which end ends. It is nil if the
// policy under which the request was planned is not in force any more.
func (l *Ledger) Enter(under Policy, res Resource, v View, end context.CancelCauseFunc) *Ticket {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.policy != under {
		return nil
	}
	if _, known := l.resources[res]; !known && (len(l.resources) >= l.Bounds.Resources || !match.Storable(res.Cluster, res.Group, res.Resource)) {
		res = overflow
	}
	state := l.resources[res]
	if state == nil {
		res.Cluster = strings.Clone(res.Cluster) // and not the path that it is a part of
		state = &resource{open: map[*watch]struct{}{}, caches: map[View]*caches{}}
		if res == overflow || l.before == nil || l.before.Affects(under, res) {
			state.changed = l.changed
		}
		if !longAgo(l.began) && l.inherited.DropsEvents(res) {
			state.doubted = l.began
			if state.changed.Before(l.began) {
				state.changed = l.began
			}
		}
		l.resources[res] = state
	}
	t := &Ticket{ledger: l, state: state, changed: state.changed, view: v}
	if end != nil {
		t.watch = &watch{view: v, end: end}
		state.open[t.watch] = struct{}{}
	}
	return t
}

// Leave removes a watch from the open ones.
func (t *Ticket) Leave() {
	l := t.ledger
	if t.watch == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(t.state.open, t.watch)
}

// Unordered notes that the events of a watch may come in another order than those of the
// versions of their objects, so that the cache may be ahead of its version.
func (t *Ticket) Unordered() {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	t.watch.unordered = true
}

// Gap makes room for what faults will keep from the client of a watch. It is nil if no
// more can be remembered; gaps are forgotten whose clients would have resumed by now.
func (t *Ticket) Gap() *Gap {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gaps >= l.Bounds.Gaps {
		for _, s := range l.resources {
			l.forget(s, func(g *Gap) bool { return g.isOver() && longAgo(g.over) })
		}
	}
	if l.gaps >= l.Bounds.Gaps {
		return nil
	}
	l.gaps++
	g := &Gap{view: t.view}
	if t.watch != nil {
		t.watch.unordered = true
	}
	t.state.gaps = append(t.state.gaps, g)
	return g
}

// End ends the watch of a gap, which may be nil. One gap is kept for all watches of a view
// that ended.
func (t *Ticket) End(g *Gap) {
	l := t.ledger
	if g == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, other := range t.state.gaps {
		if other.isOver() && other.view == g.view {
			other.Join(&g.Gap)
			other.sent, other.over = other.sent || g.sent, time.Now()
			g.Forget()
		}
	}
	g.over = time.Now()
	l.forgetEmpty(t.state)
}

// forgetEmpty forgets the gaps of watches that ended and miss nothing.
func (l *Ledger) forgetEmpty(s *resource) {
	l.forget(s, func(g *Gap) bool { return g.isOver() && g.Empty() })
}

func (l *Ledger) forget(s *resource, which func(*Gap) bool) {
	before := len(s.gaps)
	s.gaps = slices.DeleteFunc(s.gaps, which)
	l.gaps -= before - len(s.gaps)
}

// Missed reports whether a client that resumes from a version would miss what faults
// kept from it.
func (t *Ticket) Missed(version string) bool {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	missed := false
	for _, g := range t.state.gaps {
		if g.view == t.view && g.Covers(version) {
			g.sent, missed = true, true
		}
	}
	return missed
}

// Continuation says how a watch that resumes goes on.
type Continuation int

const (
	// Plain means that its cache is complete, or will be by the watch itself.
	Plain Continuation = iota
	// Supplemented means that the watch begins with the difference. Filled notes its end. A
	// client that gets none may be made to list instead: Expire.
	Supplemented
	// Expired means that its client gets 410, and lists.
	Expired
	// Over means that the policy has changed since the request was evaluated.
	Over
)

// Resume says how a watch goes on from a resource version. A cache that needs a supplement
// was filled under one of the policies before, or is between some of them.
//
// A cache that got 410 resumes from another version, or lost the response and resumes
// from the same. A version that did not get 410, while no cache is owed a correction, was
// learned after the change: by a get, say, or a create. Its watch goes on as it is.
func (t *Ticket) Resume(under Policy, version string) (how Continuation, before []Policy) {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	old := longAgo(t.state.changed)
	c := t.state.caches[t.view]
	switch {
	case !t.open():
		return Over, nil
	case t.state.kept(under), old && c == nil:
		return Plain, nil
	case c == nil:
		if c = l.cachesOf(t.state, t.view); c == nil {
			return Expired, nil
		}
		c.owed, c.unknown = 1, true // no watch of it was open at the change
	}
	how, before = c.resume(version, old, t.alone())
	if _, known := l.catchUp.awaited[t.view]; !known && how != Plain {
		l.catchUp.await(t.view, true, l.Bounds.Awaited)
	}
	return how, before
}

// Expire notes that a watch gets 410 in place of a supplement.
func (t *Ticket) Expire(version string) {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := t.state.caches[t.view]; c != nil && t.open() {
		c.refuse(version)
	}
}

// alone reports whether no other watch of the view is open.
func (t *Ticket) alone() bool {
	for w := range t.state.open {
		if w != t.watch && w.view == t.view {
			return false
		}
	}
	return true
}

// open reports whether the watch of a ticket is open, and the policy has not changed.
func (t *Ticket) open() bool {
	_, open := t.state.open[t.watch]
	return open
}

// Listed notes that a client got the whole view. A client that must list, and lists in
// other words than it watches in, has done so.
func (t *Ticket) Listed() {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, g := range t.state.gaps {
		if g.sent && g.view.path == t.view.path {
			g.Forget()
			g.sent = false
		}
	}
	l.forgetEmpty(t.state)
	if c := t.state.caches[t.view]; c != nil && !t.changed.Equal(t.state.changed) {
		c.owed, c.unknown = c.owed+1, true // a cache of a policy that has been replaced meanwhile
	}
	if !t.changed.Equal(t.state.changed) || longAgo(t.changed) && t.state.caches[t.view] == nil {
		return
	}
	if c := l.cachesOf(t.state, t.view); c != nil {
		c.list()
	}
	for v, c := range t.state.caches {
		if v.path == t.view.path {
			c.refused = nil
		}
	}
}

// Watches returns the number of open watches.
func (l *Ledger) Watches() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.resources {
		n += len(s.open)
	}
	return n
}

// Remembered returns the numbers of views and gaps that the ledger remembers.
func (l *Ledger) Remembered() (views, gaps int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.views, l.gaps
}

// Age moves all that happened into the past, by a duration. It is for tests.
func (l *Ledger) Age(by time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changed, l.began = l.changed.Add(-by), l.began.Add(-by)
	l.catchUp.age(by)
	for _, s := range l.resources {
		s.changed, s.doubted = s.changed.Add(-by), s.doubted.Add(-by)
		for _, c := range s.caches {
			c.since = c.since.Add(-by)
		}
		for _, g := range s.gaps {
			if g.isOver() {
				g.over = g.over.Add(-by)
			}
		}
	}
}
