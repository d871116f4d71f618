package proxy

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// Bounds of the memory of one pod's requests, in bytes, if no other pod uses as much.
// Requests that may last have a budget apart from short ones. Requests about the lock
// have one that nothing else can use, so that a renewal is in time.
const (
	maxHeld = 64 << 20 // six hundred short requests
	ownHeld = 2 << 20
	maxLong = 32 << 20 // a thousand watches
	ownLong = 2 << 20
	ownLock = 512 << 10
	// maxRefusing bounds the requests of a pod that are being answered 429. Further ones
	// are cut off.
	maxRefusing = 64
)

const (
	// requestWeight is the memory of any request: stacks, and the small buffers on both
	// sides.
	requestWeight = 32 << 10
	// partWeight is the memory of each part of a target while it is parsed. A requirement
	// of a selector takes the most.
	partWeight = 384
	copies     = 8 // of a target, decoded and edited
)

// weight returns the memory that r takes, in bytes, whatever it requests.
func (r *request) weight() int64 {
	n := requestWeight + copies*len(r.target)
	for _, separator := range []string{"/", "&", ",", "%"} { // escaped ones too
		n += partWeight * strings.Count(r.target, separator)
	}
	switch {
	case r.length < 0:
		n += receivePerStream
	case r.length > 0:
		n += int(min(r.length, receivePerStream))
	}
	return int64(n) + downstream.HeadWeight(r.header, 1)
}

// holding is the share of the pod's budgets that a request has until it ends.
type holding struct {
	pod      *Pod
	budget   *bounds.Account // that it is in
	held     int64           // bytes of it
	filtered int64           // bytes of what the pod's filters may keep
	over     bool            // it is beyond the budget
	refusing bool            // it is one of the maxRefusing
}

// admit charges x to a budget before the request is parsed.
func (x *exchange) admit() *apierrors.StatusError {
	x.budget, x.held = &x.pod.held, x.req.weight()
	if x.budget.Take(x.held) {
		return nil
	}
	if x.urgent() {
		return x.charge(&x.pod.lock)
	}
	return x.beyond()
}

// urgent reports whether x is about the lock, when its budget is exhausted.
func (x *exchange) urgent() bool {
	pol := x.pod.policy.Load()
	if pol == nil || len(pol.locks) == 0 || x.held > ownLock/4 {
		return false
	}
	if x.req.classify(); x.req.malformed != nil {
		return false
	}
	plan := pol.plan(x.req.info)
	return plan.locks != nil && plan.locks.urgent(x.req.info)
}

// admissionStage charges a request to the budget of its kind.
type admissionStage struct {
	route route
	locks *lockStage // not nil: a request may be urgent
}

func (s admissionStage) apply(x *exchange) *outcome {
	switch {
	case s.locks != nil && s.locks.urgent(x.req.info):
		return refusal(x.charge(&x.pod.lock))
	case s.route == stream || x.protocol != "":
		return refusal(x.charge(&x.pod.long))
	}
	return refusal(x.short())
}

// readmissionStage moves a request from the locks' budget to another if its body shows
// that it is not about a lock.
type readmissionStage struct{}

func (readmissionStage) apply(x *exchange) *outcome {
	if x.lock != nil || x.budget != &x.pod.lock {
		return nil
	}
	return refusal(x.short())
}

// short charges x to the budget of short requests.
func (h *holding) short() *apierrors.StatusError {
	if refused := h.charge(&h.pod.held); refused != nil {
		return refused
	}
	return h.hold(upstream.BufferSize)
}

// charge moves a request to another budget of the pod.
func (h *holding) charge(to *bounds.Account) *apierrors.StatusError {
	if to == h.budget {
		return nil
	}
	h.budget.Give(h.held)
	h.budget = to
	if to.Take(h.held) {
		return nil
	}
	return h.beyond()
}

// hold takes n more bytes from the budget until the request ends, or refuses the request.
func (h *holding) hold(n int64) *apierrors.StatusError {
	h.held += n
	if h.budget.Take(n) {
		return nil
	}
	return h.beyond()
}

func (h *holding) beyond() *apierrors.StatusError {
	h.over = true
	h.pod.bound("requests")
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1, "pod %s has too many requests in progress", h.pod.id)
}

// shed frees memory before a request is answered 429, or cuts it off.
func (x *exchange) shed() {
	if x.pod.refusing.Add(1) > maxRefusing {
		x.pod.refusing.Add(-1)
		panic(errAbort)
	}
	x.refusing = true
	x.strip(4 << 10)
}

// strip frees the head, except for some bytes of Accept. The map may still be read on the
// way upstream.
func (x *exchange) strip(accept int) {
	x.client.forget(accept)
	x.req.forget()
	x.out = outgoing{}
}

// release returns all that x has of the budgets.
func (x *exchange) release() {
	x.strip(0)
	x.holding.release()
	x.client.guard.Release()
}

func (h *holding) release() {
	h.budget.Give(h.held)
	h.pod.filtered.Give(h.filtered)
	if h.refusing {
		h.pod.refusing.Add(-1)
	}
}

// readAll reads all of r, up to limit bytes. They count twice, because stages copy what
// they edit.
func (h *holding) readAll(r io.Reader, limit int) ([]byte, error) {
	b := make([]byte, 0, 4<<10) // within requestWeight
	for {
		if len(b) == cap(b) {
			if refused := h.hold(2 * int64(cap(b))); refused != nil {
				return nil, refused
			}
			b = slices.Grow(b, cap(b))
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case len(b) > limit:
			return nil, status.TooLarge(limit)
		case err == io.EOF:
			return b, nil
		case err != nil:
			return nil, err
		}
	}
}

// readBody reads all of the request's body, up to limit bytes. It can be read again when
// the request starts over.
func (x *exchange) readBody(limit int) ([]byte, *apierrors.StatusError) {
	if x.out.header.get("Content-Encoding") != "" {
		return nil, status.UnsupportedMediaType("a body that the proxy must read must not be encoded")
	}
	if kept := x.req.body.whole; kept != nil {
		if len(kept) > limit {
			return nil, status.TooLarge(limit)
		}
		return kept, nil
	}
	raw, err := x.readAll(x.req.body.reader(), limit)
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return nil, refused
	}
	if err != nil {
		return nil, status.BadRequest("the body cannot be read")
	}
	x.req.body.whole = raw
	return raw, nil
}

// A request that its client abandons has cost a connection to the apiserver. Clients
// abandon some requests when deadlines are short, and all when they exit.
const (
	abandonedRate  = 100 // a second
	abandonedBurst = 1000
)

// abandoned closes the connection of a client that abandons too many requests.
func (p *Pod) abandoned(c *client) {
	if p.dropped.Allow() {
		return
	}
	p.bound("abandoned requests")
	c.closeConn()
}
