package proxy

import (
	"io"
	"net/http"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/upstream"
)

// maxHeld is how many bytes the requests of one pod under way may hold: a
// thousand short ones, or three thousand watches.
const maxHeld = 96 << 20

// requestWeight is what any request holds: stacks, and the small buffers on both
// sides of it.
const requestWeight = 32 << 10

// weight is what x holds, in bytes, but for the bodies of locks.
func (x *exchange) weight() int64 {
	n := requestWeight + len(x.r.RequestURI)
	for k, vv := range x.r.Header {
		for _, v := range vv {
			n += len(k) + len(v)
		}
	}
	if x.plan.route == short {
		n += upstream.BufferSize
	}
	if x.r.ContentLength != 0 {
		n += receivePerStream
	}
	return int64(n)
}

// hold takes n bytes from the pod's budget until the request is over, or
// refuses the request.
func (x *exchange) hold(n int64) *apierrors.StatusError {
	x.held += n
	if x.pod.held.Add(n) <= maxHeld {
		return nil
	}
	x.pod.bound("requests")
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1, "pod %s has too many requests under way", x.pod.id)
}

// readAll reads r whole, up to limit bytes. What it read counts twice: it is
// there once more when it was edited.
func (x *exchange) readAll(r io.Reader, limit int) ([]byte, error) {
	b := make([]byte, 0, 4<<10) // within requestWeight
	for {
		if len(b) == cap(b) {
			if refused := x.hold(2 * int64(cap(b))); refused != nil {
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

// A request that its client drops before the answer has cost a connection to the
// apiserver. Clients drop some when they are in a hurry, and all when they end.
const (
	abandonedRate  = 100 // a second
	abandonedBurst = 1000
)

// abandoned closes the connection of a client that makes a habit of it.
func (x *exchange) abandoned() {
	if x.pod.dropped.Allow() {
		return
	}
	x.pod.bound("abandoned requests")
	if c := connOf(x.r); c != nil {
		_ = c.Close()
	}
}
