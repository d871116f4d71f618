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
	counted   bool              // in policy.writes
	connected bool              // in pod.connects
	end       writes.Completion // of a connection
}

// connectStage records a connection into a pod or a service.
type connectStage struct{}

func (connectStage) apply(x *exchange) *outcome {
	if x.connected = x.pod.connects.enter(x); !x.connected {
		return restart
	}
	return nil
}

// enter adds x. It returns false if the policy has changed since x was evaluated.
func (c *connects) enter(x *exchange) bool {
	ctx, end := context.WithCancelCause(x.ctx)
	added := &connect{end: end}
	c.mu.Lock()
	defer c.mu.Unlock()
	if x.protocol != "" || !x.req.reads() {
		added.counts = x.policy
		x.policy.writes.Begin(x.pod.info.Journal)
	}
	if x.pod.policy.Load() != x.policy { // after the count, as in begin
		end(nil)
		if added.counts != nil {
			x.policy.writes.End(x.pod.info.Journal, 0)
		}
		return false
	}
	if c.open == nil {
		c.open = map[*exchange]*connect{}
	}
	x.ctx, x.end, c.open[x] = ctx, writes.NotSeen, added
	return true
}

func (c *connects) leave(x *exchange) {
	c.mu.Lock()
	left := c.open[x]
	delete(c.open, x)
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
