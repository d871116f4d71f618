package proxy

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"regexp"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// A stale list is asked of the apiserver: as it was at a resource version that the pod
// saw in an earlier list or watch. So it is whole, paged and narrowed as any other, and
// a watch from there on brings its client to the truth.

const (
	// kept is into how many parts a history divides its time.
	kept = 128
	// maxHead and maxTail are of a list, and have its metadata in them.
	maxHead = 2 << 10
	maxTail = 2 << 10
	// maxVersion is the length of a resource version, which is a number of 64 bits.
	maxVersion = 20
)

// staleness is what a plan for lists or watches keeps where lists can be stale.
type staleness struct {
	lists *fault.Resources
	seen  *history
}

// staleness returns nil where no rule is about lists of a resource.
func (p *policy) staleness(key planKey) *staleness {
	if key.verb != "list" && key.verb != "watch" {
		return nil
	}
	lists := p.lists(key)
	oldest := lists.Oldest()
	if oldest == 0 {
		return nil
	}
	if seen := p.pod.histories.of(key.groupResource, oldest); seen != nil {
		return &staleness{lists, seen}
	}
	return nil
}

// lists are the rules about lists of a key's resource.
func (p *policy) lists(key planKey) *fault.Resources {
	return p.faults.OfKind(match.Kind{Verb: "list", Group: key.group, Resource: key.resource, Subresource: key.subresource})
}

// histories are of the resources of one pod whose lists can be stale.
type histories struct {
	mu    sync.Mutex
	known map[groupResource]*history
}

// of returns the history of a resource, nil if no more can be remembered.
func (h *histories) of(res groupResource, oldest time.Duration) *history {
	h.mu.Lock()
	defer h.mu.Unlock()
	of := h.known[res]
	if of == nil {
		if len(h.known) >= maxResources || !memorable(res.group, res.resource) {
			return nil
		}
		if h.known == nil {
			h.known = map[groupResource]*history{}
		}
		of = &history{}
		h.known[res] = of
	}
	of.reach(oldest)
	return of
}

// enforce forgets the resources whose lists are never stale under p.
func (h *histories) enforce(p *policy) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for res := range h.known {
		if p.lists(planKey{groupResource: res}).Oldest() == 0 {
			delete(h.known, res)
		}
	}
}

// history is what resource versions of a resource were seen when, oldest first.
type history struct {
	mu     sync.Mutex
	oldest time.Duration // that is asked for
	seen   []sighting
}

type sighting struct {
	at      time.Time
	version string
}

func (h *history) reach(oldest time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.oldest = oldest
}

// see adds a version, unless one was seen just before, or a later one.
func (h *history) see(now time.Time, version []byte) {
	if len(version) == 0 || len(version) > maxVersion || bytes.ContainsFunc(version, func(r rune) bool { return r < '0' || r > '9' }) {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.seen); n > 0 && (now.Sub(h.seen[n-1].at) < h.oldest/kept || !later(string(version), h.seen[n-1].version)) {
		return
	}
	h.seen = append(h.seen, sighting{now, string(version)})
	old := 0 // of which the last is still of use
	for old+1 < len(h.seen) && !h.seen[old+1].at.After(now.Add(-h.oldest)) {
		old++
	}
	h.seen = slices.Delete(h.seen, 0, max(old, len(h.seen)-2*kept))
}

// later compares two versions, which are numbers.
func later(a, b string) bool {
	if len(a) != len(b) {
		return len(a) > len(b)
	}
	return a > b
}

// at returns the last version seen before a time, or else the first; "" if there is none.
func (h *history) at(t time.Time) (version string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, s := range h.seen {
		if i > 0 && s.at.After(t) {
			break
		}
		version = s.version
	}
	return version
}

// forget forgets a version that the apiserver has not any more, and all before it.
func (h *history) forget(version string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.IndexFunc(h.seen, func(s sighting) bool { return s.version == version }); i >= 0 {
		h.seen = slices.Delete(h.seen, 0, i+1)
	}
}

// refuseInitialEvents refuses a watch that would begin with what a list has, where lists
// can be stale, as an apiserver does that has no such watches: its client lists then.
func (s *staleness) refuseInitialEvents(x *exchange) *apierrors.StatusError {
	if x.initial == nil {
		return nil
	}
	if o := x.object(); !s.lists.MayBeStale(time.Now(), &o) {
		return nil
	}
	return status.New(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, 0,
		"sendInitialEvents is forbidden while a FaultInjection makes lists of %s stale: list, and watch from there", x.req.info.Resource)
}

// staleList is a list that a fault makes stale.
type staleList struct {
	version string // that it is asked for at, or empty
	fresh   string // the query without it
	seen    *history
}

// ask asks for a list as it was so long ago, if it begins with this request and the pod
// saw the resource before.
func (s *staleness) ask(x *exchange, age time.Duration) {
	more, _, err := query.Get(x.out.query, "continue")
	version := s.seen.at(time.Now().Add(-age))
	if err != nil || more != "" || version == "" {
		return
	}
	asked, err := query.Set(x.out.query, "resourceVersion", version)
	if err != nil {
		return
	}
	asked, err = query.Set(asked, "resourceVersionMatch", string(metav1.ResourceVersionMatchExact))
	if err != nil {
		return
	}
	x.staleList = staleList{version, x.out.query, s.seen}
	x.out.query = asked
}

// refresh asks for a list as the client did, if the apiserver has not what it was asked
// for instead.
func (x *exchange) refresh(resp upstream.Response, send func(context.Context, *upstream.Request) (upstream.Response, error)) (upstream.Response, error) {
	switch resp.Status {
	case http.StatusGone, http.StatusBadRequest, http.StatusUnprocessableEntity, http.StatusGatewayTimeout:
	default:
		return resp, nil
	}
	_ = resp.Body.Close()
	x.seen.forget(x.version)
	x.out.query, x.version = x.fresh, ""
	return send(x.ctx, x.upstreamRequest())
}

// apply has the versions in the response be readable.
func (s *staleness) apply(x *exchange) *outcome {
	if x.req.info.Verb == "list" {
		x.out.drop("Accept-Encoding")
	}
	if x.lock == nil {
		x.responses.add(s)
	}
	return nil
}

// respond notes what versions a response tells of.
func (s *staleness) respond(x *exchange, resp *upstream.Response) *outcome {
	if resp.Status != http.StatusOK || x.req.method != http.MethodGet || resp.Get("Content-Encoding") != "" {
		return nil
	}
	q := parameters(x.req.query)
	see := func(version []byte) { s.seen.see(time.Now(), version) }
	if x.req.info.Verb == "watch" {
		events, err := filter.NewEvents(resp.Body, filter.Options{ContentType: resp.Get("Content-Type"), Hold: func(n int) error { return x.holdFiltered(x.req.info.Resource, n) }})
		if err == nil {
			from := q.Get("resourceVersion")
			initial := from == "" || from == "0" || x.initial != nil
			resp.Wrap(&eventVersions{events: events, see: see, initial: initial})
		}
		return nil
	}
	if x.version == "" && q.Get("continue") == "" && q.Get("resourceVersionMatch") != string(metav1.ResourceVersionMatchExact) {
		resp.Wrap(&listVersion{Reader: resp.Body, see: see})
	}
	return nil
}

// eventVersions passes a watch on and tells of the versions in it. What it does not
// understand it passes on as it is.
type eventVersions struct {
	events *filter.Events
	see    func([]byte)
	// initial: what is added was there before, and last changed who knows when.
	initial bool

	out  []byte
	line bool      // behind out
	rest io.Reader // not nil: all that follows
}

func (r *eventVersions) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for r.rest == nil {
		if len(r.out) > 0 {
			n := copy(p, r.out)
			if r.out = r.out[n:]; len(r.out) == 0 && r.line && n < len(p) {
				p[n], r.line = '\n', false
				n++
			}
			return n, nil
		}
		if r.line {
			p[0], r.line = '\n', false
			return 1, nil
		}
		e, err := r.events.Next()
		if err != nil {
			r.rest = r.events.Rest()
			break
		}
		if r.initial = r.initial && string(e.Kind) == "ADDED"; !r.initial {
			r.see(e.Revision)
		}
		r.out, r.line = e.Bytes, !r.events.Protobuf()
	}
	return r.rest.Read(p)
}

// listVersion passes a list on and tells of its version at the end.
type listVersion struct {
	io.Reader
	see        func([]byte)
	head, tail []byte
}

func (r *listVersion) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.head = append(r.head, p[:min(n, maxHead-len(r.head))]...)
	r.tail = append(r.tail, p[max(0, n-maxTail):n]...)
	r.tail = slices.Delete(r.tail, 0, max(0, len(r.tail)-maxTail))
	if err == io.EOF {
		r.see(versionOf(r.head, r.tail))
	}
	return n, err
}

// The metadata of a list in JSON come first, as of all that is built in, or last, as of
// custom resources.
var (
	first = regexp.MustCompile(`^\{"kind":"[^"]*","apiVersion":"[^"]*","metadata":\{[^{}]*?"resourceVersion":"([0-9]+)"`)
	last  = regexp.MustCompile(`"metadata":\{[^{}]*"resourceVersion":"([0-9]+)"[^{}]*(?:\{[^{}]*\})?\}\}\s*$`)
)

// versionOf reads the resource version of a list; nil if it is not found.
func versionOf(head, tail []byte) []byte {
	if raw, ok := bytes.CutPrefix(head, []byte("k8s\x00")); ok {
		return protoVersion(raw)
	}
	if m := first.FindSubmatch(head); m != nil {
		return m[1]
	}
	if m := last.FindSubmatch(tail); m != nil {
		return m[1]
	}
	return nil
}

// protoVersion reads the beginning of a list's envelope: its second field is the list,
// whose first is its metadata, of which the second is the version.
func protoVersion(b []byte) []byte {
	cut := false
	for _, wanted := range []protowire.Number{2, 1, 2} {
		for {
			number, kind, n := protowire.ConsumeTag(b)
			if n < 0 {
				return nil
			}
			if b = b[n:]; number == wanted && kind == protowire.BytesType {
				break
			}
			if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
				return nil
			}
			b = b[n:]
		}
		size, n := protowire.ConsumeVarint(b)
		if n < 0 {
			return nil
		}
		b = b[n:]
		if cut = size > uint64(len(b)); !cut {
			b = b[:size]
		}
	}
	if cut {
		return nil
	}
	return b
}
