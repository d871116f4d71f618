package proxy

import (
	"io"
	"net/http"
	"slices"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/upstream"
)

// pool is what the pods of a node share of something.
type pool struct{ free atomic.Int64 }

// account is one pod's part: something of its own, and beyond that never more
// than is left for the others. So one pod alone gets half of the pool, and n of
// them 1/(n+1) each: however many take all they can, others find something.
type account struct {
	pool  *pool
	own   int64
	taken atomic.Int64
}

// newPool makes a pool of which one pod alone gets most, its own included.
func newPool(most, own int64) *pool {
	p := &pool{}
	p.free.Store(2 * (most - own))
	return p
}

// take takes n and tells whether that is within bounds; it is taken either way.
func (a *account) take(n int64) bool {
	now := a.taken.Add(n)
	if now <= a.own {
		return true
	}
	beyond := now - a.own
	return beyond <= a.pool.free.Add(max(0, now-n-a.own)-beyond)
}

// give gives n back.
func (a *account) give(n int64) {
	if before := a.taken.Add(-n) + n; before > a.own {
		a.pool.free.Add(before - max(a.own, before-n))
	}
}

// maxHeld is how many bytes the requests of one pod under way may hold, if no
// other holds as much: a thousand short ones, or three thousand watches.
const (
	maxHeld = 96 << 20
	ownHeld = 2 << 20
)

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
	if x.pod.held.take(n) {
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
