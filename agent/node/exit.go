package node

import (
	"context"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// phase is a step of an agent's exit.
type phase int

const (
	serving phase = iota
	// handing: the captured pods were offered to a successor. No other pod is captured,
	// because the successor would not know of it.
	handing
	// yielded: the successor serves. This agent ends the requests in flight, by the policies
	// that arrive, and leaves all redirections alone.
	yielded
	// leaving: the pods in capture mode address are not served any more either.
	leaving
	// stopped: nothing is captured, nor will be.
	stopped
)

// departure is the state of an agent's exit.
type departure struct {
	*core
	effects *effects
	yielded chan struct{} // closed when no more pods are captured
	drained chan struct{} // closed when nothing of the pods is in flight any more

	left      map[string]*proxy.Pod // to the next agent
	draining  int                   // pods whose requests are in flight
	unsettled int                   // pods whose writes are in flight
}

const (
	// The bounds below add up to less than takeover.MaxExit.

	// successorWait is how long an agent goes on serving after the signal to stop until a
	// successor asks: a DaemonSet that may surge replaces a deleted pod at once.
	successorWait = 10 * time.Second
	// drainWithin is how long requests may go on after a takeover, and idle connections
	// stay open.
	drainWithin = 15 * time.Second
	// addressWait is how long new connections arrive at an address after its pod begins
	// to terminate, until the routing of all nodes has changed.
	addressWait = 3 * time.Second
	// shutdownGrace is how long requests may take when a pod has exited.
	shutdownGrace = time.Second
)

// yield leaves the pods to another agent. Pods in capture mode address stay: while this
// agent's address is one of its Service's, their connections arrive here too.
func (d *departure) yield() {
	if d.phase >= yielded {
		return
	}
	d.enter(yielded)
	close(d.yielded)
	d.Logger.Info("another agent serves: ending the requests in flight", "pods", len(d.pods))
	d.left = map[string]*proxy.Pod{}
	for uid, p := range d.pods {
		if p.redirection.captured != nil && !p.byAddress() {
			d.left[uid] = p.redirection.proxied
			d.abandon(uid, p)
		}
	}
	d.settle()
}

// abandon ends the requests in flight of a pod that another agent serves.
func (d *departure) abandon(uid string, p *pod) {
	name := p.info.String()
	d.logError(p.redirection.captured.Abandon(), "failed to abandon a pod", p)
	d.logError(p.redirection.webhook.abandon(), "failed to abandon the webhook of a pod", p)
	captured, proxied, record := p.redirection.captured, p.redirection.proxied, p.redirection.journal
	p.redirection.captured = nil // policies still reach the requests in flight
	d.effects.handle(uid, p, lifecycle.Takeover)
	d.draining++
	d.unsettled++
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), drainWithin)
		defer cancel()
		if err := proxied.Drain(ctx); err != nil {
			d.Logger.Info("connections were cut after the takeover", "pod", name, "error", err)
		}
		_ = captured.Release() // its network namespace
		// This agent answers for the writes in flight until they have ended, or this
		// process exits. Then its journal has the deadlines.
		applied, err := proxied.Apply(&meshv1.PodPolicy{Refuse: "another agent serves this pod"})
		if err == nil {
			record.Close()
		}
		d.countDown(&d.draining)
		if err == nil {
			<-applied.Settled
		}
		d.countDown(&d.unsettled)
	}()
}

// countDown decrements a counter in the loop. Without a loop nothing waits for it.
func (d *departure) countDown(count *int) {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
	defer cancel()
	_ = d.run(ctx, func() {
		*count--
		d.settle()
	})
}

// settle closes drained once nothing is in flight any more.
func (d *departure) settle() {
	if d.phase < yielded || d.unsettled > 0 || len(d.uids((*pod).byAddress)) > 0 {
		return
	}
	select {
	case <-d.drained:
	default:
		d.Logger.Info("nothing is in flight any more")
		close(d.drained)
		// An agent that exits without a takeover leaves the journal: its successor reads there
		// that nothing is in flight.
		if d.phase != stopped {
			d.logError(d.Journal.Retire(), "failed to remove the journal", nil)
		}
	}
}

// stop leaves the redirections in place: until the next agent listens, connections are
// refused, and nothing goes around the mesh. Pods that fail open go direct.
func (d *departure) stop() {
	if d.phase == stopped {
		return
	}
	before := d.phase
	d.enter(stopped)
	ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
	defer cancel()
	var ended sync.WaitGroup
	for uid, p := range d.pods {
		if proxied := p.redirection.proxied; proxied != nil {
			ended.Go(func() { _ = proxied.Shutdown(ctx) })
		}
		_ = p.redirection.webhook.abandon()
		p.redirection.captured, p.redirection.proxied = nil, nil
		d.effects.handle(uid, p, lifecycle.Stop)
	}
	ended.Wait()
	d.logError(d.Capture.Close(), "failed to close the capture", nil)
	if d.Inbound != nil {
		d.logError(d.Inbound.Close(), "failed to close the capture of inbound connections", nil)
	}
	if before < yielded {
		close(d.yielded)
	}
	d.draining, d.unsettled = 0, 0
	d.settle()
}

// AwaitDrained blocks after the signal to stop. It returns when a successor has taken over and
// nothing is in flight, or when no successor came.
func (n *Node) AwaitDrained() {
	d := n.departure
	ctx, cancel := context.WithTimeout(context.Background(), takeover.MaxExit)
	defer cancel()
	rerouted := time.After(addressWait)
	if !d.awaitYield(ctx) {
		return
	}
	select {
	case <-d.drained:
		return
	case <-rerouted:
	}
	_ = d.run(ctx, func() {
		d.enter(leaving)
		for uid, p := range d.pods {
			if p.redirection.captured != nil {
				d.abandon(uid, p)
			}
		}
		d.settle()
	})
	select {
	case <-d.drained:
	case <-ctx.Done():
	}
}

// awaitYield reports whether a successor has taken over, or one that asked in time does
// before ctx ends.
func (d *departure) awaitYield(ctx context.Context) bool {
	select {
	case <-d.yielded:
		return true
	case <-time.After(successorWait):
	}
	offered := false
	if d.run(ctx, func() { offered = d.phase == handing }) != nil || !offered {
		return false
	}
	select {
	case <-d.yielded:
		return true
	case <-ctx.Done():
		return false
	}
}
