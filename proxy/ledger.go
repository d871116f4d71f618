package proxy

import (
	"context"
	"errors"
	"hash/maphash"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// Bounds of the ledger's memory, against pods that request many different paths.
const (
	maxResources = 512
	maxDebts     = 1 << 14 // of all resources
	maxGaps      = 1 << 10 // of all resources: watches that drop events, or did
)

// settling is how long after a change a cache may turn up that no watch was open
// for. client-go comes back within a minute; who comes after this is taken to
// have no cache from before, and who is still told to be unable to do as told.
const settling = 10 * time.Minute

func longAgo(changed time.Time) bool { return time.Since(changed) > settling }

// overflow stands for all resources above maxResources. It is stale after any change.
var overflow = groupResource{"*", "*"}

var errPolicyChanged = errors.New("the policy changed")

// ledger records which watches are open, and which of a client's caches may contain
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
type ledger struct {
	mu      sync.Mutex
	changed time.Time // when the policy in force was applied
	// before is the policy under which caches of resources not seen yet were filled;
	// nil if that is unknown.
	before *policy
	// began is when the first policy came, and inherited are its faults. The proxy
	// before may have ended while these kept events from watches: caches of what they
	// are about are told once to list.
	began     time.Time
	inherited *fault.Rules
	resources map[groupResource]*resourceState
	debts     int // of all resources
	gaps      int // of all resources
}

type resourceState struct {
	changed time.Time // when the set of objects changed
	doubted time.Time // when it was not known any more what its caches miss
	open    map[*watch]struct{}
	debts   map[view]*debt // since changed; a view that is not here owes one
	gaps    []*gap
}

// kept reports whether its caches are to be left as they are.
func (s *resourceState) kept(p *policy) bool { return p.keepCaches && longAgo(s.doubted) }

// doubt reports whether a cache must list only because it is unknown what it misses.
func (l *ledger) doubt(t *ticket, under *policy) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := t.state
	return !longAgo(s.doubted) && (under.keepCaches || s.changed.Equal(s.doubted))
}

// gap is what faults kept from a watch's client, for as long as the watch lasts and,
// if something is missed then, until the client has listed. Unlike a debt it is no
// matter of policies, so it is told of whether caches are to be kept or not.
type gap struct {
	events.Gap
	view view
	told bool      // one who would have missed it, to list
	over time.Time // when the watch ended; zero: it has not
}

func (g *gap) isOver() bool { return !g.over.IsZero() }

// debt is what the caches of one view have to be told yet, and were.
type debt struct {
	owed int      // caches that have not come back: a watch of each was ended
	told []uint64 // the resource versions that were answered 410, hashed
}

// view identifies a cache of a client by a hash of its requests: the client controls how
// long and how many they are. Caches with identical requests cannot be distinguished.
type view struct{ path, words uint64 }

type words struct{ path, labels, fields, as, agent string }

var seed = maphash.MakeSeed()

func (w words) view() view {
	return view{maphash.String(seed, w.path), maphash.Comparable(seed, w)}
}

// watch is an open watch. end ends it cleanly.
type watch struct {
	view view
	end  context.CancelCauseFunc
}

// ticket is a list's or watch's place in the ledger.
type ticket struct {
	state   *resourceState
	changed time.Time
	view    view
	watch   *watch
}

// change atomically puts next in force and ends the watches that it affects: requests
// that enter the ledger afterwards find next. since is when the first policy was applied;
// later policies are applied now.
func (l *ledger) change(p *Pod, next *policy, since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	next.inherit(p.policy.Load())
	next.acquire()
	next.enforce() // before it is asked: its rules may not know yet what was imported
	old := p.policy.Swap(next)
	if p.info.Journal != nil {
		p.info.Journal.Unseen(p.unseen())
	}
	old.release()
	if longAgo(l.changed) {
		l.before = old
	}
	l.changed = time.Now()
	if old == nil {
		l.began, l.inherited = l.changed, next.faults
		if since.Before(l.changed) {
			l.changed = since
		}
	}
	for res, state := range l.resources {
		if res == overflow || old.affects(next, res) {
			l.expire(state, !state.kept(next))
		}
	}
	p.connects.cut(next)
	if !next.passthrough {
		p.tunnels.cut() // nothing of a pod that is held to something may go unseen
	}
	p.succeed(old, next)
}

// expire ends the watches of a resource, and if told is true makes every cache of it
// one that must be told.
func (l *ledger) expire(s *resourceState, told bool) {
	for v, d := range s.debts {
		if d.owed == 0 || longAgo(s.changed) || !told {
			delete(s.debts, v)
			l.debts--
		}
	}
	s.changed = l.changed
	for w := range s.open {
		w.end(errPolicyChanged)
		delete(s.open, w) // the next change may come before it has left
		if !told {
			continue
		}
		if d := l.debt(s, w.view, 0); d != nil {
			d.owed++
		}
	}
}

// debt returns what is known of a view; at first it owes the given number. It is
// nil when no more can be remembered.
func (l *ledger) debt(s *resourceState, v view, owed int) *debt {
	d := s.debts[v]
	if d == nil && l.debts < maxDebts {
		d = &debt{owed: owed}
		if s.debts == nil {
			s.debts = map[view]*debt{}
		}
		s.debts[v] = d
		l.debts++
	}
	return d
}

// enter returns the ticket of a list or watch. It fails with errPolicyChanged if the
// policy under which the request was planned is not in force any more.
func (l *ledger) enter(x *exchange, res groupResource, v view, end context.CancelCauseFunc) (*ticket, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if x.pod.policy.Load() != x.policy {
		return nil, errPolicyChanged
	}
	if _, known := l.resources[res]; !known && (len(l.resources) >= maxResources || !memorable(res.group, res.resource)) {
		res = overflow
	}
	state := l.resources[res]
	if state == nil {
		state = &resourceState{open: map[*watch]struct{}{}}
		if res == overflow || l.before == nil || l.before.affects(x.policy, res) {
			state.changed = l.changed
		}
		if !longAgo(l.began) && l.inherited.Drops(match.Kind{Verb: "watch", Group: res.group, Resource: res.resource}) {
			state.doubted = l.began
			if state.changed.Before(l.began) {
				state.changed = l.began
			}
		}
		if l.resources == nil {
			l.resources = map[groupResource]*resourceState{}
		}
		l.resources[res] = state
	}
	t := &ticket{state: state, changed: state.changed, view: v}
	if end != nil {
		t.watch = &watch{view: v, end: end}
		state.open[t.watch] = struct{}{}
	}
	return t, nil
}

// leave ends a watch's place.
func (l *ledger) leave(t *ticket) {
	if t.watch == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(t.state.open, t.watch)
}

// gap makes room for what faults will keep from the client of a watch. It is nil if no
// more can be remembered; those are forgotten whose clients would have come back by now.
func (l *ledger) gap(t *ticket) *gap {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gaps >= maxGaps {
		for _, s := range l.resources {
			l.forget(s, func(g *gap) bool { return g.isOver() && longAgo(g.over) })
		}
	}
	if l.gaps >= maxGaps {
		return nil
	}
	l.gaps++
	g := &gap{view: t.view}
	t.state.gaps = append(t.state.gaps, g)
	return g
}

// over ends the watch that g is about, if any. Of one view one gap is kept of all
// watches that ended.
func (l *ledger) over(t *ticket, g *gap) {
	if g == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, other := range t.state.gaps {
		if other.isOver() && other.view == g.view {
			other.Join(&g.Gap)
			other.told, other.over = other.told || g.told, time.Now()
			g.Forget()
		}
	}
	g.over = time.Now()
	l.mend(t.state)
}

// mend forgets the gaps of watches that ended and miss nothing.
func (l *ledger) mend(s *resourceState) {
	l.forget(s, func(g *gap) bool { return g.isOver() && g.Empty() })
}

func (l *ledger) forget(s *resourceState, which func(*gap) bool) {
	before := len(s.gaps)
	s.gaps = slices.DeleteFunc(s.gaps, which)
	l.gaps -= before - len(s.gaps)
}

// missed reports whether one who resumes from a version would miss what faults kept
// from it.
func (l *ledger) missed(t *ticket, version string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	missed := false
	for _, g := range t.state.gaps {
		if g.view == t.view && g.Covers(version) {
			g.told, missed = true, true
		}
	}
	return missed
}

// resumable reports whether a watch may go on from a resource version.
//
// A cache that was told comes back with another version, or lost the answer and
// comes back with the same. So a version that was not told while none is owed
// was learned since: by a get, say, or a create.
func (l *ledger) resumable(t *ticket, under *policy, version string) bool {
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
	case slices.Contains(d.told, hash):
		return old
	case d.owed == 0:
		return true
	}
	d.owed--
	d.told = append(d.told, hash)
	return false
}

// listed notes that the view was served whole. A client that was told to list
// and listed in other words than it watches in is taken to have done as told.
func (l *ledger) listed(t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, g := range t.state.gaps {
		if g.told && g.view.path == t.view.path {
			g.Forget()
			g.told = false
		}
	}
	l.mend(t.state)
	if !t.changed.Equal(t.state.changed) || longAgo(t.changed) && t.state.debts[t.view] == nil {
		return
	}
	for v, d := range t.state.debts {
		if v.path == t.view.path {
			d.told = nil
		}
	}
	if d := l.debt(t.state, t.view, 0); d != nil {
		d.owed = 0
	}
}

// resumption is the entry of a list or watch in the ledger.
type resumption struct {
	ticket  *ticket        // nil: it has none
	gap     *gap           // what faults keep from a watch's client
	fills   bool           // the response fills a client's cache from nothing
	initial *initialEvents // not nil: a watch whose initial events have not ended
	settled atomic.Int64   // Unix nanoseconds since when a watch's client has all it began with
}

// leave ends the place.
func (r *resumption) leave(l *ledger) {
	if r.ticket != nil {
		l.over(r.ticket, r.gap)
		l.leave(r.ticket)
		r.ticket = nil
	}
}

// relistStage keeps the ledger for a list or a watch of one resource.
type relistStage struct {
	resource groupResource
	watch    bool
}

func (s *relistStage) apply(x *exchange) *outcome {
	q := parameters(x.req.query) // the client's own: stages have edited what is sent
	var end context.CancelCauseFunc
	if s.watch {
		x.ctx, end = context.WithCancelCause(x.ctx)
	}
	t, err := x.pod.ledger.enter(x, s.resource, viewOf(x, q), end)
	if err != nil {
		return restart
	}
	x.ticket = t
	initial := s.watch && truthy(q["sendInitialEvents"])
	if initial {
		x.initial = &initialEvents{}
	}
	x.fills = !s.watch && q.Get("continue") == "" || initial
	if version := q.Get("resourceVersion"); s.watch && !initial && version != "" && version != "0" {
		return refusal(s.resume(x, version))
	}
	return nil
}

func viewOf(x *exchange, q url.Values) view {
	return words{
		path:   strings.TrimRight(x.req.path, "/"),
		labels: q.Get("labelSelector"),
		fields: q.Get("fieldSelector"),
		as:     transform(x.out.header.get("Accept")),
		agent:  x.out.header.get("User-Agent"),
	}.view()
}

// resume refuses a watch from a resource version whose client must list first.
func (s *relistStage) resume(x *exchange, version string) *apierrors.StatusError {
	expired := func(format string, args ...any) *apierrors.StatusError {
		return status.New(http.StatusGone, metav1.StatusReasonExpired, 0, format, args...)
	}
	l, resource := &x.pod.ledger, s.resource.resource
	switch {
	case l.missed(x.ticket, version):
		return expired("faults were injected into a watch of %s, and events kept back when it ended: list again", resource)
	case l.resumable(x.ticket, x.policy, version):
		return nil
	case l.doubt(x.ticket, x.policy):
		return expired("faults may have kept events of %s from watches of an earlier proxy, which is gone: list again", resource)
	}
	return expired("what shard %q sees of %s has changed since resource version %s: list again", x.policy.shard, resource, version)
}

// truthy parses a boolean parameter as the apiserver does.
func truthy(values []string) bool {
	return len(values) > 0 && values[0] != "0" && !strings.EqualFold(values[0], "false")
}

// transform returns the kind into which an Accept header requests objects to be converted.
// Lists and watches of one client spell it differently with the same meaning.
func transform(accept string) string {
	switch {
	case strings.Contains(accept, "as=PartialObjectMetadata"):
		return "PartialObjectMetadata"
	case strings.Contains(accept, "as=Table"):
		return "Table"
	}
	return ""
}
