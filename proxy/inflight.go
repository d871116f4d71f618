package proxy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// unseen returns [writes.Unseen] of the policy in force.
func (p *Pod) unseen() time.Duration {
	timeout := meshv1.DefaultRequestTimeout
	if pol := p.env.Policy.Load(); pol != nil {
		timeout = cmp.Or(pol.RequestTimeout, timeout)
	}
	return timeout + meshv1.LostWrite
}

// succeed settles next after old, which is nil for the first policy.
func (p *Pod) succeed(old, next *stages.Policy) {
	over := func() {
		p.inForce.settled.Store(next)
		close(next.Succession.Settled)
		next.Succession.Writes.Lower()
	}
	if old == nil {
		over()
		return
	}
	close(old.Succession.Replaced)
	old.Succession.Writes.Over(over)
	if old.Passthrough && !next.Passthrough { // writes in tunnels were not counted
		if left := p.accepting.tunnels.remain(p.unseen()); left > 0 {
			old.Succession.Writes.LowerAfter(left)
			return
		}
	}
	old.Succession.Writes.Lower()
}

// begin counts x before the last of it is sent. It returns false if the policy has changed
// since x was evaluated: x must not be sent.
//
// It counts first and compares then. So if the policy is replaced and nothing counts, no
// write will be sent under it.
func (x *exchange) begin() bool {
	x.policy.Succession.Writes.Begin(x.pod.env.Info.Journal)
	if x.pod.env.Policy.Load() != x.policy {
		x.policy.Succession.Writes.End(x.pod.env.Info.Journal, 0)
		return false
	}
	x.counted = true
	return true
}

// answered records how a write that counts ended upstream.
func (x *exchange) answered(resp *upstream.Response, err error) {
	if !x.counted {
		return
	}
	x.counted = false
	x.policy.Succession.Writes.End(x.pod.env.Info.Journal, x.completion(resp, err).Left(x.pod.unseen()))
}

// completion judges a write, or a connection, by its response or error.
func (x *exchange) completion(resp *upstream.Response, err error) writes.Completion {
	awaited := x.pod.lifetime.writing.Err() != nil && !errors.Is(context.Cause(x.pod.lifetime.writing), errUnanswerable)
	return writes.Complete(x.Plan.Key, !x.sending.Sent.IsZero(), awaited, resp, err)
}

// lastByte is the body of a write that is read while it is sent. The write counts from the
// last byte on: until then the apiserver does nothing, and a client that stops sending would
// delay the settling of policies.
type lastByte struct {
	io.Reader
	x    *exchange
	left int64 // -1: unknown
}

func (b *lastByte) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if b.left > 0 {
		b.left -= int64(n)
	}
	if (b.left == 0 || err == io.EOF) && !b.x.counted {
		if !b.x.begin() {
			return 0, relist.ErrPolicyChanged
		}
		if gone := b.x.Req.Gone(); gone != nil {
			return 0, gone
		}
	}
	return n, err
}

// depart prepares a write for sending: it counts, and continues without its client or pod,
// because only the response shows when it has ended. It returns false if the request must
// be evaluated again.
func (x *exchange) depart() bool {
	x.Ctx = x.pod.lifetime.writing
	if _, whole := x.Out.Body.(*bytes.Reader); whole || x.Out.Length == 0 {
		return x.begin()
	}
	x.Out.Body = &lastByte{Reader: x.Out.Body, x: x, left: x.Out.Length}
	return true
}
