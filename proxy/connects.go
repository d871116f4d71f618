package proxy

import (
	"context"
	"sync"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// connects are the open connections into pods and services. Stages do not see what is done
// over them.
type connects struct {
	mu   sync.Mutex
	open map[*state]*connect
}

// connect is one of them.
type connect struct {
	end context.CancelCauseFunc
	// counts is the policy in whose writes it counts; nil: it only reads.
	counts *policy
}

// flight is what is counted of a write, or of a connection into a pod or a service.
type flight struct {
	counted bool              // in policy.writes
	end     writes.Completion // of a connection
}

// enter adds x. It returns false if the policy has changed since x was evaluated.
func (p *Pod) enter(x *state, pol *policy) bool {
	c := &p.connects
	ctx, end := context.WithCancelCause(x.ctx)
	added := &connect{end: end}
	c.mu.Lock()
	defer c.mu.Unlock()
	if x.protocol != "" || !x.req.reads() {
		added.counts = pol
		pol.writes.Begin(p.info.Journal)
	}
	if p.policy.Load() != pol { // after the count, as in begin
		end(nil)
		if added.counts != nil {
			pol.writes.End(p.info.Journal, 0)
		}
		return false
	}
	if c.open == nil {
		c.open = map[*state]*connect{}
	}
	x.ctx, c.open[x] = ctx, added
	return true
}

func (c *connects) leave(x *exchange) {
	c.mu.Lock()
	left := c.open[&x.state]
	delete(c.open, &x.state)
	c.mu.Unlock()
	left.end(nil)
	if x.sending.Sent.IsZero() {
		x.end = writes.Ended
	}
	if left.counts != nil {
		left.counts.writes.End(x.pod.info.Journal, x.end.Left(x.pod.unseen()))
	}
}

// cut ends the connections that the policy now in force would refuse. Requests that write
// get a moment for their response, because our end of the connection does not show whether
// the apiserver has ended its own. The others continue, and count under the new policy.
func (c *connects) cut(next *policy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for x, open := range c.open {
		refused := next.refuse != "" || next.Refuses(x.plan.key, x.req.info.Namespace)
		switch {
		case refused && open.counts != nil && x.protocol == "":
			time.AfterFunc(meshv1.LostWrite, func() { open.end(relist.ErrPolicyChanged) })
		case refused:
			open.end(relist.ErrPolicyChanged)
		case open.counts != nil:
			next.writes.Raise()
			open.counts.writes.Lower()
			open.counts = next
		}
	}
}
