package proxy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// UnseenWrite is how long a write that a policy let through may still take effect
// when neither its response nor the apiserver's end of the connection was seen: the
// apiserver works on it until its own request timeout.
func UnseenWrite(m *meshv1.PodPolicy) time.Duration {
	return cmp.Or(requestTimeout(m), meshv1.DefaultRequestTimeout) + meshv1.LostWrite
}

// requestTimeout returns the apiserver's request timeout according to a policy; 0 if
// the policy does not say.
func requestTimeout(m *meshv1.PodPolicy) time.Duration {
	if m.GetSharding() == nil {
		return 0
	}
	return cmp.Or(time.Duration(m.GetSharding().GetRequestTimeoutSeconds())*time.Second, meshv1.DefaultRequestTimeout)
}

// inherit takes over what a policy without sharding leaves as it was.
func (p *policy) inherit(old *policy) {
	if p.requestTimeout == 0 && old != nil {
		p.requestTimeout = old.requestTimeout
	}
}

// unseen is [UnseenWrite] of the policy in force.
func (p *Pod) unseen() time.Duration {
	timeout := meshv1.DefaultRequestTimeout
	if pol := p.policy.Load(); pol != nil {
		timeout = cmp.Or(pol.requestTimeout, timeout)
	}
	return timeout + meshv1.LostWrite
}

// writes counts what a policy let through that may still change something: each
// write from before its last byte leaves until nothing comes of it any more. The
// policy itself counts while it is in force, and once more while what earlier
// policies let through is not over.
type writes struct {
	n    atomic.Int64
	once sync.Once
	over func() // called once when nothing counts; set before the policy is replaced

	mu    sync.Mutex
	lost  bool      // writes are over at until; all of them count as one
	until time.Time // grows
}

func (w *writes) raise() { w.n.Add(1) }

func (w *writes) lower() {
	// A request that finds the policy replaced may raise it from nothing for a moment.
	if w.n.Add(-1) == 0 {
		w.once.Do(w.over)
	}
}

// lowerAfter is lower after a while. One timer serves all, because a pod can lose
// writes as fast as it makes them.
func (w *writes) lowerAfter(d time.Duration) {
	w.mu.Lock()
	first := !w.lost
	w.lost = true
	if until := time.Now().Add(d); until.After(w.until) {
		w.until = until
	}
	w.mu.Unlock()
	if first {
		time.AfterFunc(d, w.expire)
	} else {
		w.lower()
	}
}

func (w *writes) expire() {
	w.mu.Lock()
	left := time.Until(w.until)
	w.lost = left > 0
	w.mu.Unlock()
	if left > 0 {
		time.AfterFunc(left, w.expire)
	} else {
		w.lower()
	}
}

// Journal records where it outlives this process that writes of a pod are in flight.
// Its methods are safe for concurrent use and never block.
type Journal interface {
	// Begin comes before a write leaves. Then comes End when it takes effect no more,
	// or Lose when it may for a while yet.
	Begin()
	End()
	Lose(left time.Duration)
	// Unseen is how long a write goes on when its end was not seen.
	Unseen(d time.Duration)
}

// raise counts a write of the pod.
func (p *Pod) raise(w *writes) {
	if p.info.Journal != nil {
		p.info.Journal.Begin()
	}
	w.raise()
}

// lower uncounts a write that may take effect for a while yet, or not any more.
func (p *Pod) lower(w *writes, left time.Duration) {
	p.record(left)
	if left > 0 {
		w.lowerAfter(left)
	} else {
		w.lower()
	}
}

// record is the journal's part of lower.
func (p *Pod) record(left time.Duration) {
	switch {
	case p.info.Journal == nil:
	case left > 0:
		p.info.Journal.Lose(left)
	default:
		p.info.Journal.End()
	}
}

// succeed makes next what takes the place of old, which is nil for the first.
func (p *Pod) succeed(old, next *policy) {
	over := func() {
		p.settled.Store(next)
		close(next.settled)
		next.writes.lower()
	}
	if old == nil {
		over()
		return
	}
	close(old.replaced)
	old.writes.over = over
	if old.passthrough && !next.passthrough { // what went through tunnels was not counted
		if left := p.tunnels.remain(p.unseen()); left > 0 {
			old.writes.lowerAfter(left)
			return
		}
	}
	old.writes.lower()
}

// begin counts x before the last of it leaves. It is false when another policy has
// come since x was looked at: x must not leave.
//
// First the count, then the look: so whoever replaces the policy, and then finds
// that nothing counts, knows that nothing will leave under it.
func (x *exchange) begin() bool {
	x.pod.raise(&x.policy.writes)
	if x.pod.policy.Load() != x.policy {
		x.pod.lower(&x.policy.writes, 0)
		return false
	}
	x.counted = true
	return true
}

// answered notes how a write that counts ended upstream.
func (x *exchange) answered(resp *upstream.Response, err error) {
	if !x.counted {
		return
	}
	x.counted = false
	x.pod.lower(&x.policy.writes, x.completion(resp, err).left(x.pod))
}

// completion is what is known of the end of a write at the apiserver.
type completion int

const (
	// unseen: it may go on until the apiserver's request timeout.
	unseen completion = iota
	// dropped: the apiserver does nothing more for it, but etcd may.
	dropped
	// ended: it has taken effect, or never will.
	ended
)

// left is how long a write may still take effect.
func (c completion) left(p *Pod) time.Duration {
	switch c {
	case ended:
		return 0
	case dropped:
		return meshv1.LostWrite
	}
	return p.unseen()
}

// completion judges a write by its response, or by the error instead of one. The
// apiserver knows of our end of a connection only once it has ended its own.
func (x *exchange) completion(resp *upstream.Response, err error) completion {
	if err == nil {
		switch {
		case resp.Status < http.StatusInternalServerError:
			return ended
		case x.plan.key.local() && fromAPIServer(resp.Header):
			return dropped
		}
		return unseen
	}
	_, cutShort := errors.AsType[*upstream.BodyError](err)
	switch {
	case x.sending.Sent.IsZero():
		return ended
	case cutShort && !x.plan.key.connects(): // the apiserver does nothing without the last byte
		return dropped
	case upstream.Ended(err):
		return dropped
	case errors.Is(context.Cause(x.pod.writing), errUnanswerable):
		return unseen
	case x.pod.writing.Err() != nil: // it was awaited for as long as it may go on
		return dropped
	}
	return unseen
}

// fromAPIServer reports whether an error was encoded by an API server. What a proxy says
// in place of one, the apiserver's own aggregation layer included, is plain text.
func fromAPIServer(h header) bool {
	mediaType, _, err := mime.ParseMediaType(h.get("Content-Type"))
	return err == nil && (mediaType == typeJSON || mediaType == typeProtobuf)
}

// lastByte is the body of a write that comes while it leaves. The write counts
// from the last byte on: until then the apiserver does nothing with it, and a client
// that sends none would keep others waiting.
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
			return 0, errPolicyChanged
		}
		if gone := b.x.req.gone(); gone != nil {
			return 0, gone
		}
	}
	return n, err
}

// depart makes a write ready to leave: it counts, and goes on when its client or
// the pod has gone away, because only its response shows when it is over. It is
// false when it must be looked at anew.
func (x *exchange) depart() bool {
	x.ctx = x.pod.writing
	if _, whole := x.out.body.(*bytes.Reader); whole || x.out.length == 0 {
		return x.begin()
	}
	x.out.body = &lastByte{Reader: x.out.body, x: x, left: x.out.length}
	return true
}

// connects are the open connections into pods and services. What is done over them
// is not asked about again.
type connects struct {
	mu   sync.Mutex
	open map[*exchange]*connect
}

// connect is one of them.
type connect struct {
	end context.CancelCauseFunc
	// counts is the policy in whose writes it counts; nil: it only reads.
	counts *policy
}

// flight is what is counted of a write, or of a connection into a pod or a service.
type flight struct {
	counted   bool       // in policy.writes
	connected bool       // in pod.connects
	end       completion // of a connection
}

// connectStage keeps account of a connection into a pod or a service.
type connectStage struct{}

func (connectStage) apply(x *exchange) *outcome {
	if x.connected = x.pod.connects.enter(x); !x.connected {
		return restart
	}
	return nil
}

// enter adds x. It is false when another policy has come since x was looked at.
func (c *connects) enter(x *exchange) bool {
	ctx, end := context.WithCancelCause(x.ctx)
	added := &connect{end: end}
	c.mu.Lock()
	defer c.mu.Unlock()
	if x.protocol != "" || !x.req.reads() {
		added.counts = x.policy
		x.pod.raise(&x.policy.writes)
	}
	if x.pod.policy.Load() != x.policy { // after the count, as in begin
		end(nil)
		if added.counts != nil {
			x.pod.lower(&x.policy.writes, 0)
		}
		return false
	}
	if c.open == nil {
		c.open = map[*exchange]*connect{}
	}
	x.ctx, x.end, c.open[x] = ctx, unseen, added
	return true
}

func (c *connects) leave(x *exchange) {
	c.mu.Lock()
	left := c.open[x]
	delete(c.open, x)
	c.mu.Unlock()
	left.end(nil)
	if x.sending.Sent.IsZero() {
		x.end = ended
	}
	if left.counts != nil {
		x.pod.lower(&left.counts.writes, x.end.left(x.pod))
	}
}

// cut ends those that a policy which is in force now would not let through. Requests
// that write get a moment to be answered: our end of them says nothing of theirs. The
// others go on under the new policy, and count there.
func (c *connects) cut(next *policy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for x, open := range c.open {
		refused := next.refuse != "" || next.refuses(x.plan.key, x.req.info.Namespace)
		switch {
		case refused && open.counts != nil && x.protocol == "":
			time.AfterFunc(meshv1.LostWrite, func() { open.end(errPolicyChanged) })
		case refused:
			open.end(errPolicyChanged)
		case open.counts != nil:
			next.writes.raise()
			open.counts.writes.lower()
			open.counts = next
		}
	}
}
