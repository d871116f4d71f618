package pipeline

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// Bounds of the memory of one pod's requests, in bytes, if no other pod uses as much.
// Requests that may last have a budget apart from short ones. Requests about the lock
// have one that nothing else can use, so that a renewal is in time.
const (
	MaxHeld = 64 << 20 // six hundred short requests
	OwnHeld = 2 << 20
	// DefaultWatchMemory is for 5,000 watches that are filtered.
	DefaultWatchMemory = 184 << 20
	OwnLong            = 2 << 20
	OwnLock            = 512 << 10
	// MaxFiltered is for lists and large objects that filters keep.
	MaxFiltered = 64 << 20
	OwnFiltered = 4 << 20
	// MaxRefusing bounds the requests of a pod that are being answered 429. Further ones
	// are cut off.
	MaxRefusing = 64
)

const (
	// RequestWeight is the memory of any request: stacks, and the small buffers on both
	// sides.
	RequestWeight = 32 << 10
	// PartWeight is the memory of each part of a target while it is parsed. A requirement
	// of a selector takes the most.
	PartWeight = 384
	// StreamWeight is the memory of a stream that is open: 29 KiB while it is idle, by
	// BenchmarkOpenWatches of package proxy, and the small buffer for what arrives.
	StreamWeight = 33 << 10
	copies       = 8 // of a target, decoded and edited
	// ReceivePerStream bounds what is received of a body before it is read.
	ReceivePerStream = 64 << 10
)

// Weight returns the memory that r takes, in bytes, whatever it requests.
func (r *Request) Weight() int64 {
	n := RequestWeight + copies*len(r.Target)
	for _, separator := range []string{"/", "&", ",", "%"} { // escaped ones too
		n += PartWeight * strings.Count(r.Target, separator)
	}
	switch {
	case r.Length < 0:
		n += ReceivePerStream
	case r.Length > 0:
		n += int(min(r.Length, ReceivePerStream))
	}
	return int64(n) + r.Header.Weight()
}

// Budgets are a pod's budgets for its requests.
type Budgets struct {
	Pod      string         // namespace/name
	Held     bounds.Account // bytes of short requests
	Long     bounds.Account // bytes of those that may last
	MaxLong  int64          // what Long may have if no other pod uses as much
	Lock     bounds.Account // bytes of those about the lock
	Filtered bounds.Account // bytes that filters keep
	Refusing atomic.Int64   // requests that are answered 429
	// Bound reports that the pod has reached a bound.
	Bound func(what string)
}

// BoundWatches is the name of the bound of Budgets.Long.
const BoundWatches = "watches"

// Withhold takes n bytes for what the proxy keeps of a response, if they are within bounds.
func (a *Budgets) Withhold(n int64) bool {
	if a.Filtered.Take(n) {
		return true
	}
	a.Filtered.Give(n)
	return false
}

// Holding is the share of the pod's budgets that a request has until it ends.
type Holding struct {
	Budgets  *Budgets
	Budget   *bounds.Account // that it is in
	Held     int64           // bytes of it
	filtered int64           // bytes of what the pod's filters may keep
	Over     bool            // it is above the budget
	Refusing bool            // it is one of the MaxRefusing
}

// Short charges the request to the budget of short requests.
func (h *Holding) Short() *apierrors.StatusError {
	if refused := h.Charge(&h.Budgets.Held); refused != nil {
		return refused
	}
	return h.Hold(upstream.BufferSize)
}

// Charge moves a request to another budget of the pod.
func (h *Holding) Charge(to *bounds.Account) *apierrors.StatusError {
	if to == h.Budget {
		return nil
	}
	h.Budget.Give(h.Held)
	h.Budget = to
	if to.Take(h.Held) {
		return nil
	}
	return h.Exceeded()
}

// Hold takes n more bytes from the budget until the request ends, or refuses the request.
func (h *Holding) Hold(n int64) *apierrors.StatusError {
	h.Held += n
	if h.Budget.Take(n) {
		return nil
	}
	return h.Exceeded()
}

// Exceeded refuses a request that is above a budget.
func (h *Holding) Exceeded() *apierrors.StatusError {
	h.Over = true
	if h.Budget == &h.Budgets.Long {
		h.Budgets.Bound(BoundWatches)
		return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1,
			"pod %s has too many watches and other lasting requests open: they may take %s of the agent's memory, less while other pods of the node take much: raise agent.watchMemory of the chart (--watch-memory of the agent)",
			h.Budgets.Pod, resource.NewQuantity(h.Budgets.MaxLong, resource.BinarySI))
	}
	h.Budgets.Bound("requests")
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1, "pod %s has too many requests in progress", h.Budgets.Pod)
}

// Release returns all of the share.
func (h *Holding) Release() {
	h.Budget.Give(h.Held)
	h.Budgets.Filtered.Give(h.filtered)
	if h.Refusing {
		h.Budgets.Refusing.Add(-1)
	}
}

// ReadAll reads all of r, up to limit bytes. They count twice, because stages copy what
// they edit.
func (h *Holding) ReadAll(r io.Reader, limit int) ([]byte, error) {
	b := make([]byte, 0, 4<<10) // within RequestWeight
	for {
		if len(b) == cap(b) {
			if refused := h.Hold(2 * int64(cap(b))); refused != nil {
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

// GiveFiltered gives back n bytes that a filter keeps no longer.
func (h *Holding) GiveFiltered(n int) {
	h.filtered -= int64(n)
	h.Budgets.Filtered.Give(int64(n))
}

// HoldFiltered takes n bytes that a filter of a resource keeps until the request is over.
func (h *Holding) HoldFiltered(resource string, n int) error {
	h.filtered += int64(n)
	if h.Budgets.Filtered.Take(int64(n)) {
		return nil
	}
	h.Budgets.Bound("filtered bytes")
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1,
		"pod %s requests more %s than can be filtered at once: list in pieces (limit), or as JSON", h.Budgets.Pod, resource)
}

var errNoRoom = errors.New("no room to read an event")

// HoldRead takes n bytes that an event is read into, until the request is over. An event
// that there is no room for is passed as it is, and all after it.
func (h *Holding) HoldRead(n int) error {
	if !h.Budgets.Withhold(int64(n)) {
		return errNoRoom
	}
	h.filtered += int64(n)
	return nil
}
