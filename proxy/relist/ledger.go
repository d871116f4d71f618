// Package relist records what the caches of a pod's clients have: which of them must list
// again after a policy change, what injected faults kept from them, and which resource
// versions they have seen.
package relist

import (
	"context"
	"errors"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Bounds limit the memory of a ledger, against pods that request many different paths.
type Bounds struct {
	Resources int
	Debts     int // of all resources
	Gaps      int // of all resources: watches that drop events, or did
	Awaited   int // views whose caches are awaited after a change
}

// Settling is how long after a change a cache may resume that had no watch open at the
// change. client-go resumes within a minute. A client that comes later has no cache from
// before, and one that still does not list cannot.
const Settling = 10 * time.Minute

func longAgo(changed time.Time) bool { return time.Since(changed) > Settling }

// Policy is what a ledger asks of a policy.
type Policy interface {
	// Affects reports whether clients get other objects of a resource under next.
	Affects(next Policy, res schema.GroupResource) bool
	// Redivides reports whether the pod owns other objects under next, or caches others.
	Redivides(next Policy) bool
	// KeepsCaches reports whether caches must not be made to list.
	KeepsCaches() bool
	// DropsEvents reports whether faults drop events from watches of a resource.
	DropsEvents(res schema.GroupResource) bool
}

// overflow stands for all resources above maxResources. It is stale after any change.
var overflow = schema.GroupResource{Group: "*", Resource: "*"}

// ErrPolicyChanged ends requests under a policy that is not in force any more.
var ErrPolicyChanged = errors.New("the policy changed")

// Ledger records which watches are open, and which of a client's caches may contain
// another set of objects than the policy in force gives.
//
// A cache that was filled under another scope must be filled again: a watch that resumes
// would miss the objects that the pod gained, and never delete those that it lost. So a
// change of the policy ends the watches of the resource, and each cache that resumes gets
// 410 once, so that it lists.
//
// One limitation remains: the ledger cannot distinguish two caches with identical requests
// (the same view). If one of them had no watch open at the change, it may resume after the
// other has listed or got its 410.
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
	resources map[schema.GroupResource]*resource
	debts     int // of all resources
	gaps      int // of all resources
	catchUp   catchUp
}

// NewLedger returns an empty Ledger.
func NewLedger() *Ledger {
	return &Ledger{
		Bounds:    Bounds{Resources: 512, Debts: 1 << 14, Gaps: 1 << 10, Awaited: 1 << 10},
		resources: map[schema.GroupResource]*resource{},
	}
}

type resource struct {
	changed time.Time // when the set of objects changed
	doubted time.Time // since when it is unknown what its caches miss
	open    map[*watch]struct{}
	debts   map[View]*debt // since changed; a view that is not here owes one
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

// debt counts the caches of one view that must list.
type debt struct {
	owed int      // caches that have not resumed: a watch of each was ended
	sent []uint64 // the resource versions that got 410, hashed
}

// View identifies a cache of a client by a hash of its requests: the client controls how
// long and how many they are. Caches with identical requests cannot be distinguished.
type View struct {
	path, words uint64
	one         bool // object, by its name
}

// Words of a list or watch that distinguish the caches of a client. Name is that of the one
// object it is about, or empty.
type Words struct{ Path, Labels, Fields, As, Agent, Name string }

var seed = maphash.MakeSeed()

// View returns the view of a request.
func (w Words) View() View {
	return View{maphash.String(seed, w.Path), maphash.Comparable(seed, w), w.Name != ""}
}

// watch is an open watch. end ends it cleanly.
type watch struct {
	view View
	end  context.CancelCauseFunc
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
		if res == overflow || old.Affects(next, res) {
			l.expire(state, !state.kept(next))
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

// expire ends the watches of a resource, and if relist is true makes its caches list.
func (l *Ledger) expire(s *resource, relist bool) {
	for v, d := range s.debts {
		if d.owed == 0 || longAgo(s.changed) || !relist {
			delete(s.debts, v)
			l.debts--
		}
	}
	s.changed = l.changed
	for w := range s.open {
		w.end(ErrPolicyChanged)
		delete(s.open, w) // the next change may come before it has left
		if !relist {
			continue
		}
		l.catchUp.await(w.view, l.Bounds.Awaited)
		if d := l.debt(s, w.view, 0); d != nil {
			d.owed++
		}
	}
}

// debt returns the debt of a view, which begins with the given number; nil if no more can
// be remembered.
func (l *Ledger) debt(s *resource, v View, owed int) *debt {
	d := s.debts[v]
	if d == nil && l.debts < l.Bounds.Debts {
		d = &debt{owed: owed}
		s.debts[v] = d
		l.debts++
	}
	return d
}

// Enter returns the ticket of a list, or of a watch, which end ends. It is nil if the
// policy under which the request was planned is not in force any more.
func (l *Ledger) Enter(under Policy, res schema.GroupResource, v View, end context.CancelCauseFunc) *Ticket {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.policy != under {
		return nil
	}
	if _, known := l.resources[res]; !known && (len(l.resources) >= l.Bounds.Resources || !match.Storable(res.Group, res.Resource)) {
		res = overflow
	}
	state := l.resources[res]
	if state == nil {
		state = &resource{open: map[*watch]struct{}{}, debts: map[View]*debt{}}
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

// Resumable reports whether a watch may go on from a resource version.
//
// A cache that got 410 resumes from another version, or lost the response and resumes
// from the same. So a version that did not get 410 while no cache owes a list was learned
// since: by a get, say, or a create.
func (t *Ticket) Resumable(under Policy, version string) bool {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.state.kept(under) {
		return true
	}
	old := longAgo(t.state.changed)
	if old && t.state.debts[t.view] == nil {
		return true
	}
	d := l.debt(t.state, t.view, 1)
	if d == nil {
		return false
	}
	hash := maphash.String(seed, version)
	switch {
	case slices.Contains(d.sent, hash):
		return old
	case d.owed == 0:
		return true
	}
	d.owed--
	d.sent = append(d.sent, hash)
	if _, known := l.catchUp.awaited[t.view]; !known { // no watch of it was open at the change
		l.catchUp.await(t.view, l.Bounds.Awaited)
	}
	return false
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
	if !t.changed.Equal(t.state.changed) || longAgo(t.changed) && t.state.debts[t.view] == nil {
		return
	}
	for v, d := range t.state.debts {
		if v.path == t.view.path {
			d.sent = nil
		}
	}
	if d := l.debt(t.state, t.view, 0); d != nil {
		d.owed = 0
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

// Remembered returns the numbers of debts and gaps that the ledger remembers.
func (l *Ledger) Remembered() (debts, gaps int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.debts, l.gaps
}

// Age moves all that happened into the past, by a duration. It is for tests.
func (l *Ledger) Age(by time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changed, l.began = l.changed.Add(-by), l.began.Add(-by)
	l.catchUp.age(by)
	for _, s := range l.resources {
		s.changed, s.doubted = s.changed.Add(-by), s.doubted.Add(-by)
		for _, g := range s.gaps {
			if g.isOver() {
				g.over = g.over.Add(-by)
			}
		}
	}
}
