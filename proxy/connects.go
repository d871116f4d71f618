package proxy

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// connects are the open connections into pods and services. Stages do not see what is done
// over them.
type connects struct {
	mu   sync.Mutex
	open map[*pipeline.State]*connect
}

// connect is one of them.
type connect struct {
	end context.CancelCauseFunc
	// counts is the policy in whose writes it counts; nil: it only reads.
	counts *stages.Policy
}

// enter adds x. It returns false if the policy has changed since x was evaluated.
func (p *Pod) enter(x *pipeline.State, pol *stages.Policy) bool {
	c := &p.inForce.connects
	ctx, end := context.WithCancelCause(x.Ctx)
	added := &connect{end: end}
	c.mu.Lock()
	defer c.mu.Unlock()
	if x.Protocol != "" || !x.Req.Reads() {
		added.counts = pol
		pol.Succession.Writes.Begin(p.env.Info.Journal)
	}
	if p.env.Policy.Load() != pol { // after the count, as in begin
		end(nil)
		if added.counts != nil {
			pol.Succession.Writes.End(p.env.Info.Journal, 0)
		}
		return false
	}
	x.Ctx, c.open[x] = ctx, added
	return true
}

func (c *connects) leave(x *exchange) {
	c.mu.Lock()
	left := c.open[&x.State]
	delete(c.open, &x.State)
	c.mu.Unlock()
	left.end(nil)
	if x.sending.Sent.IsZero() {
		x.end = writes.Ended
	}
	if left.counts != nil {
		left.counts.Succession.Writes.End(x.pod.env.Info.Journal, x.end.Left(x.pod.unseen()))
	}
}

// cut ends the connections that the policy now in force would refuse. Requests that write
// get a moment for their response, because our end of the connection does not show whether
// the apiserver has ended its own. The others continue, and count under the new policy.
func (c *connects) cut(next *stages.Policy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for x, open := range c.open {
		refused := next.Refuse != "" || next.RefusesNow(x)
		switch {
		case refused && open.counts != nil && x.Protocol == "":
			time.AfterFunc(meshv1.LostWrite, func() { open.end(relist.ErrPolicyChanged) })
		case refused:
			open.end(relist.ErrPolicyChanged)
		case open.counts != nil:
			next.Succession.Writes.Raise()
			open.counts.Succession.Writes.Lower()
			open.counts = next
		}
	}
}

// upgrade hands the client's connection over to one of its own upstream.
func (x *exchange) upgrade(client *upstream.Client, protocol string) *pipeline.Outcome {
	x.Allowed.Waits()
	var up *upstream.Upgraded
	var err error
	x.reply, up, err = client.Upgrade(x.Ctx, x.upstreamRequest(), protocol)
	if err != nil {
		x.end = x.completion(nil, err)
		return pipeline.Failure(err)
	}
	x.received = time.Now()
	if up == nil { // refused, for example with 403: an ordinary response
		x.end = x.completion(&x.reply, nil)
		defer func() { _ = x.reply.Body.Close() }()
		if end := x.Responses.Respond(&x.State, &x.reply); end != nil {
			return end
		}
		x.sendHead(&x.reply)
		x.copyStream(x.reply.Body)
		return nil
	}
	defer func() { _ = up.Close() }()
	if end := x.Responses.Respond(&x.State, &x.reply); end != nil {
		return end
	}
	if x.Injection.Faults != nil {
		x.Injection.Faults.Missed(fault.SlowBody) // there is no body
	}
	pipeline.DropHopByHop(&x.reply.Header)
	down, buffered, err := x.response.client.hijack()
	if err != nil {
		return pipeline.Failure(fmt.Errorf("hijack: %w", err))
	}
	defer func() { _ = down.Close() }()
	x.response.begun, x.response.code = true, x.reply.Status
	x.account()
	if err := writeSwitch(down, x.reply.Header, protocol); err != nil {
		return nil
	}
	x.end = x.splice(down, buffered, up)
	return nil
}

// maxDrained bounds what is read and discarded after the client is gone, in bytes.
const maxDrained = 1 << 20

// splice copies in both directions until one side ends, the pod shuts down, or a policy
// ends the connection. If the apiserver did not end first, splice sends it the end and
// waits for its own: until then, the apiserver may pass on what it received.
func (x *exchange) splice(down io.ReadWriteCloser, early io.Reader, up *upstream.Upgraded) writes.Completion {
	closed := make(chan struct{})
	closeOurs := sync.OnceFunc(func() {
		_ = down.Close()
		_ = up.CloseWrite()
		close(closed)
	})
	defer context.AfterFunc(x.pod.lifetime.done, closeOurs)()
	defer context.AfterFunc(x.Ctx, closeOurs)()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer closeOurs()
		_, _ = io.Copy(up, early) // what the server has buffered, then the connection
	})
	theirs := make(chan struct{})
	from := &lastError{Reader: up}
	go func() {
		defer close(theirs)
		defer closeOurs()
		x.response.bytes, _ = io.Copy(down, from)
		if from.err == nil {
			closeOurs()
			_, _ = io.CopyN(io.Discard, from, maxDrained)
		}
	}()
	<-closed
	waited := false
	select {
	case <-theirs:
	case <-time.After(x.pod.unseen()):
		waited = true
	case <-x.pod.lifetime.writing.Done():
	}
	_ = up.Close()
	<-theirs
	wg.Wait()
	switch {
	case waited || from.err != io.EOF && upstream.Ended(from.err): //nolint:errorlint // what io.Reader returns
		return writes.Dropped
	case from.err == io.EOF: //nolint:errorlint // what io.Reader returns
		return writes.Ended
	}
	return writes.NotSeen
}

// lastError remembers how a reader ended.
type lastError struct {
	io.Reader
	err error // nil: it has not
}

func (r *lastError) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil {
		r.err = err
	}
	return n, err
}
