package node

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// phase is how far an agent has got on its way out.
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

// departure is the way out of an agent.
type departure struct {
	phase   phase
	shown   atomic.Int32  // phase, for other goroutines than the loop
	yielded chan struct{} // closed when no pod is captured anew any more
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
	// shutdownGrace is how long requests may take when a pod is gone.
	shutdownGrace = time.Second
)

func (n *Node) enter(p phase) {
	n.phase = p
	n.shown.Store(int32(p))
}

// yield leaves the pods to another agent. Pods in capture mode address stay: while this
// agent's address is one of its Service's, their connections arrive here too.
func (n *Node) yield() {
	if n.phase >= yielded {
		return
	}
	n.enter(yielded)
	close(n.yielded)
	n.Logger.Info("another agent serves; ending what is under way", "pods", len(n.pods))
	n.left = map[string]*proxy.Pod{}
	for uid, p := range n.pods {
		if p.captured != nil && p.captured.Mode() != capture.Address {
			n.left[uid] = p.proxied
			n.abandon(uid, p)
		}
	}
	n.settle()
}

// abandon ends the requests in flight of a pod that another agent serves.
func (n *Node) abandon(uid string, p *pod) {
	name := p.info.String()
	if err := p.captured.Abandon(); err != nil {
		n.Logger.Error("letting go of a pod", "pod", name, "error", err)
	}
	captured, proxied, record := p.captured, p.proxied, p.journal
	p.captured = nil // policies still reach the requests in flight
	n.handle(uid, p, lifecycle.Takeover)
	n.draining++
	n.unsettled++
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), drainWithin)
		defer cancel()
		if err := proxied.Drain(ctx); err != nil {
			n.Logger.Info("connections were cut after the hand-over", "pod", name, "error", err)
		}
		_ = captured.Release() // its network namespace
		// This agent answers for the writes in flight until they have ended, or this
		// process exits. Then its journal has the deadlines.
		applied, err := proxied.Apply(&meshv1.PodPolicy{Refuse: "another agent serves this pod"})
		if err == nil {
			record.Close()
		}
		n.countDown(&n.draining)
		if err == nil {
			<-applied.Settled
		}
		n.countDown(&n.unsettled)
	}()
}

// countDown decrements a counter in the loop. Without a loop nobody needs to know.
func (n *Node) countDown(count *int) {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
	defer cancel()
	_ = n.do(ctx, func() error {
		*count--
		n.settle()
		return nil
	})
}

// settle closes drained once nothing is in flight any more.
func (n *Node) settle() {
	if n.phase < yielded || n.unsettled > 0 || n.byAddress() {
		return
	}
	select {
	case <-n.drained:
	default:
		n.Logger.Info("nothing is under way any more")
		close(n.drained)
		n.retireJournal()
	}
}

// retireJournal removes the journal after a takeover. An agent that exits without a
// takeover leaves it: its successor reads there that nothing is in flight.
func (n *Node) retireJournal() {
	if n.phase == stopped {
		return
	}
	if err := n.Journal.Retire(); err != nil {
		n.Logger.Error("failed to remove the journal", "error", err)
	}
}

// byAddress reports whether a pod is captured in mode address.
func (n *Node) byAddress() bool {
	for _, p := range n.pods {
		if p.captured != nil && p.captured.Mode() == capture.Address {
			return true
		}
	}
	return false
}

// stop leaves the redirections in place: until the next agent listens, connections are
// refused, and nothing goes around the mesh. Pods that fail open go direct.
func (n *Node) stop() {
	if n.phase == stopped {
		return
	}
	before := n.phase
	n.enter(stopped)
	var proxied []*proxy.Pod
	for uid, p := range n.pods {
		if p.proxied != nil {
			proxied = append(proxied, p.proxied)
		}
		p.captured, p.proxied = nil, nil
		n.handle(uid, p, lifecycle.Stop)
	}
	shutdown(proxied)
	if err := n.Capture.Close(); err != nil {
		n.Logger.Error("closing the capture", "error", err)
	}
	if before < yielded {
		close(n.yielded)
	}
	n.draining, n.unsettled = 0, 0
	n.settle()
}

// shutdown ends the requests in flight of all pods at once.
func shutdown(all []*proxy.Pod) {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
	defer cancel()
	var wg sync.WaitGroup
	for _, p := range all {
		wg.Go(func() { _ = p.Shutdown(ctx) })
	}
	wg.Wait()
}

// Linger blocks after the signal to stop. It returns when a successor has taken over and
// nothing is in flight, or when no successor came.
func (n *Node) Linger() {
	ctx, cancel := context.WithTimeout(context.Background(), takeover.MaxExit)
	defer cancel()
	rerouted := time.After(addressWait)
	if !n.awaitYield(ctx) {
		return
	}
	select {
	case <-n.drained:
		return
	case <-rerouted:
	}
	_ = n.do(ctx, func() error {
		n.enter(leaving)
		for uid, p := range n.pods {
			if p.captured != nil {
				n.abandon(uid, p)
			}
		}
		n.settle()
		return nil
	})
	select {
	case <-n.drained:
	case <-ctx.Done():
	}
}

// awaitYield reports whether a successor has taken over, or one that asked in time does
// before ctx ends.
func (n *Node) awaitYield(ctx context.Context) bool {
	select {
	case <-n.yielded:
		return true
	case <-time.After(successorWait):
	}
	offered := false
	if n.do(ctx, func() error { offered = n.phase == handing; return nil }) != nil || !offered {
		return false
	}
	select {
	case <-n.yielded:
		return true
	case <-ctx.Done():
		return false
	}
}
