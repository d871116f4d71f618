package proxy

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

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
	// Filters may keep lists and large objects.
	maxFiltered = 64 << 20
	ownFiltered = 4 << 20
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

// accounts are a pod's budgets for its requests.
type accounts struct {
	pod      string         // namespace/name
	held     bounds.Account // bytes of short requests
	long     bounds.Account // bytes of those that may last
	lock     bounds.Account // bytes of those about the lock
	filtered bounds.Account // bytes that filters keep
	refusing atomic.Int64   // requests that are answered 429
	// bound reports that the pod has reached a bound.
	bound func(what string)
}

// withhold takes n bytes for what is kept from a client, if they are within bounds.
func (a *accounts) withhold(n int64) bool {
	if a.filtered.Take(n) {
		return true
	}
	a.filtered.Give(n)
	return false
}

// holding is the share of the pod's budgets that a request has until it ends.
type holding struct {
	accounts *accounts
	budget   *bounds.Account // that it is in
	held     int64           // bytes of it
	filtered int64           // bytes of what the pod's filters may keep
	over     bool            // it is beyond the budget
	refusing bool            // it is one of the maxRefusing
}

// short charges x to the budget of short requests.
func (h *holding) short() *apierrors.StatusError {
	if refused := h.charge(&h.accounts.held); refused != nil {
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
	h.accounts.bound("requests")
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1, "pod %s has too many requests in progress", h.accounts.pod)
}

// release returns all of the share.
func (h *holding) release() {
	h.budget.Give(h.held)
	h.accounts.filtered.Give(h.filtered)
	if h.refusing {
		h.accounts.refusing.Add(-1)
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

// holdFiltered takes n bytes that a filter of a resource keeps until the request is over.
func (h *holding) holdFiltered(resource string, n int) error {
	h.filtered += int64(n)
	if h.accounts.filtered.Take(int64(n)) {
		return nil
	}
	h.accounts.bound("filtered bytes")
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1,
		"pod %s requests more %s than can be filtered at once: list in pieces (limit), or as JSON", h.accounts.pod, resource)
}

var errNoRoom = errors.New("no room to read an event")

// holdRead takes n bytes that an event is read into, until the request is over. An event
// that there is no room for is passed as it is, and all after it.
func (h *holding) holdRead(n int) error {
	if !h.accounts.withhold(int64(n)) {
		return errNoRoom
	}
	h.filtered += int64(n)
	return nil
}
