package proxy

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// Bounds of what one pod's odd paths can make the ledger remember.
const (
	maxResources = 512
	maxViews     = 4096 // per resource
)

// overflow stands for all resources beyond maxResources. It is stale after any
// change.
var overflow = groupResource{"*", "*"}

var errPolicyChanged = errors.New("the policy changed")

// ledger knows which watches are open and which of a client's caches may hold
// another set of objects than the policy in force would give.
//
// A cache that was filled under other limits must be filled anew: a watch that
// resumes would miss what the pod gained and never drop what it lost. So after a
// change the resource's watches are ended and a resumed one is answered 410
// until the same view of it was listed again.
type ledger struct {
	mu        sync.Mutex
	resources map[groupResource]*resourceState
}

type resourceState struct {
	changes int // bumped when the set of objects changed
	open    map[*watch]struct{}
	// served are the views listed since the last change; told are those that
	// were answered 410 since, by path.
	served map[view]bool
	told   map[string][]view
}

// view is what one cache of a client asks for. Two caches of one path differ in
// these, if in anything.
type view struct{ path, labels, fields, as, agent string }

// watch is one open watch; end ends it cleanly.
type watch struct{ end context.CancelCauseFunc }

// ticket is a list's or watch's place in the ledger.
type ticket struct {
	state   *resourceState
	changes int
	view    view
	watch   *watch
}

// change puts next in force and ends the watches that it affects, in one step:
// whoever enters the ledger after it finds next.
func (l *ledger) change(p *Pod, next *policy) {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := p.policy.Swap(next)
	if old == nil {
		return
	}
	for res, state := range l.resources {
		if res != overflow && !old.affects(next, res) {
			continue
		}
		state.changes++
		state.served, state.told = nil, nil
		for w := range state.open {
			w.end(errPolicyChanged)
		}
	}
}

// enter gives a list or watch its ticket. It fails with errPolicyChanged when
// the policy that the request was planned under is not in force any more.
func (l *ledger) enter(x *exchange, res groupResource, v view, end context.CancelCauseFunc) (*ticket, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if x.pod.policy.Load() != x.policy {
		return nil, errPolicyChanged
	}
	if _, known := l.resources[res]; !known && len(l.resources) >= maxResources {
		res = overflow
	}
	state := l.resources[res]
	if state == nil {
		state = &resourceState{open: map[*watch]struct{}{}}
		if l.resources == nil {
			l.resources = map[groupResource]*resourceState{}
		}
		l.resources[res] = state
	}
	t := &ticket{state: state, changes: state.changes, view: v}
	if end != nil {
		t.watch = &watch{end: end}
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

// resumable tells whether a watch may go on from where the client's cache is.
func (l *ledger) resumable(t *ticket) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.state.changes == 0 || t.state.served[t.view] {
		return true
	}
	if t.state.told == nil {
		t.state.told = map[string][]view{}
	}
	if told := t.state.told[t.view.path]; len(told) < maxViews && len(t.state.told) < maxViews {
		t.state.told[t.view.path] = append(told, t.view)
	}
	return false
}

// listed notes that the view was served whole. A client that was told to list
// and listed in other words than it watches in is taken to have done as told,
// or it would be told for ever.
func (l *ledger) listed(t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.changes != t.state.changes || t.changes == 0 {
		return
	}
	if t.state.served == nil {
		t.state.served = map[view]bool{}
	}
	for _, v := range append(t.state.told[t.view.path], t.view) {
		if len(t.state.served) < maxViews {
			t.state.served[v] = true
		}
	}
	delete(t.state.told, t.view.path)
}

// relistStage keeps the ledger for a list or a watch of one resource.
type relistStage struct {
	resource groupResource
	watch    bool
}

func (s *relistStage) apply(x *exchange) *apierrors.StatusError {
	// The client's own words: the stages before have edited the exchange's.
	q := x.r.URL.Query()
	first := q.Get
	v := view{
		path:   strings.TrimRight(x.r.URL.Path, "/"),
		labels: first("labelSelector"),
		fields: first("fieldSelector"),
		as:     transform(x.r.Header.Get("Accept")),
		agent:  x.r.Header.Get("User-Agent"),
	}
	var end context.CancelCauseFunc
	if s.watch {
		x.ctx, end = context.WithCancelCause(x.ctx)
	}
	t, err := x.pod.ledger.enter(x, s.resource, v, end)
	if err != nil {
		x.again = true
		return nil
	}
	x.ticket = t
	initial := truthy(q["sendInitialEvents"])
	x.fills = !s.watch && first("continue") == "" || s.watch && initial
	version := first("resourceVersion")
	if s.watch && !initial && version != "" && version != "0" && !x.pod.ledger.resumable(t) {
		return status.New(http.StatusGone, metav1.StatusReasonExpired, 0,
			"what shard %q sees of %s has changed since resource version %s: list again", x.policy.shard, s.resource.resource, version)
	}
	return nil
}

// truthy reads a boolean parameter as the apiserver does.
func truthy(values []string) bool {
	return len(values) > 0 && values[0] != "0" && !strings.EqualFold(values[0], "false")
}

// transform is the kind an Accept header asks objects to be turned into. Lists
// and watches of one client spell it differently, and mean the same.
func transform(accept string) string {
	switch {
	case strings.Contains(accept, "as=PartialObjectMetadata"):
		return "PartialObjectMetadata"
	case strings.Contains(accept, "as=Table"):
		return "Table"
	}
	return ""
}
