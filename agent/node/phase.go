package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// phase is how far an agent is on its way out.
type phase int

const (
	serving phase = iota
	// handing: what is captured was offered to a successor. Nothing else is
	// captured, lest the successor not know of it.
	handing
	// yielded: the successor serves. This agent ends what is under way, under the
	// policies of the day, and leaves all redirections alone.
	yielded
	// leaving: not even the pods that know this agent by address are its own.
	leaving
	// stopped: nothing is captured, nor will it be.
	stopped
)

const (
	// The bounds below add up to less than the pod's termination grace.

	// successorWait is how long an agent that is told to end goes on serving, for
	// a successor to ask: a DaemonSet that may surge replaces a deleted pod at once.
	successorWait = 10 * time.Second
	// drainWithin is how long requests may go on after a hand-over, and connections
	// stay open that nothing is asked on.
	drainWithin = 15 * time.Second
	// addressWait is how long new connections come in at an address after its pod
	// is told to end: until all nodes' routing knows.
	addressWait = 3 * time.Second
	// endWithin is the longest way out.
	endWithin = 27 * time.Second
)

func (n *Node) enter(p phase) {
	n.phase = p
	n.now.Store(int32(p))
}

// holder is the agent as its successor sees it.
type holder struct{ *Node }

// Incumbent returns the node as its successor sees it.
func (n *Node) Incumbent() takeover.Incumbent { return holder{n} }

// Offer implements takeover.Incumbent.
func (h holder) Offer(ctx context.Context) (offered []takeover.Pod, err error) {
	err = h.do(ctx, func() error {
		if h.phase != serving {
			return errors.New("this agent does not serve any more")
		}
		h.enter(handing)
		for uid, mb := range h.members {
			if mb.captured == nil {
				continue
			}
			handed, err := mb.captured.Hand()
			if err != nil {
				// The successor captures it as after a crash.
				h.Logger.Error("handing a pod over", "pod", mb.pod.String(), "error", err)
			}
			mb.confirmed = h.version(mb) // holds for what the successor does until it serves
			offered = append(offered, takeover.Pod{
				UID: uid, Namespace: mb.pod.Namespace, Name: mb.pod.Name, Version: mb.confirmed, Handed: handed,
				Traffic: h.counted(mb.proxied), Journaled: h.Journal.Outlives(),
			})
		}
		return nil
	})
	if ctx.Err() != nil {
		offered = nil // the loop may be at it still
	}
	return offered, err
}

// Yield implements takeover.Incumbent.
func (h holder) Yield(ctx context.Context) (drained <-chan struct{}, err error) {
	return h.drained, h.do(ctx, func() error { h.yield(); return nil })
}

// Traffic implements takeover.Incumbent.
func (h holder) Traffic(ctx context.Context) (traffic map[string][]byte) {
	_ = h.do(ctx, func() error {
		traffic = map[string][]byte{}
		for uid, p := range h.left {
			traffic[uid] = h.counted(p)
		}
		return nil
	})
	if ctx.Err() != nil {
		traffic = nil // the loop may be at it still
	}
	return traffic
}

// counted is what a pod's rules have counted, for the next agent.
func (n *Node) counted(p *proxy.Pod) []byte {
	if p == nil {
		return nil
	}
	data, err := p.ExportTraffic()
	if err != nil {
		n.Logger.Error("telling the next agent what rules have counted", "error", err)
	}
	return data
}

// recount lets the pods' rules go on from where those of the agent before this one are.
func (n *Node) recount(traffic map[string][]byte) {
	for uid, data := range traffic {
		mb := n.members[uid]
		if mb == nil || mb.proxied == nil || len(data) == 0 {
			continue
		}
		if err := mb.proxied.ImportTraffic(data); err != nil {
			n.Logger.Error("rules begin anew", "pod", mb.pod.String(), "reason", err)
		}
	}
}

// Resume implements takeover.Incumbent.
func (h holder) Resume(ctx context.Context) error {
	return h.do(ctx, func() error {
		if h.phase != handing {
			return nil
		}
		h.enter(serving)
		h.podsChanged()
		h.addSuccessor()
		// What was said meanwhile is in force in this agent only.
		for _, mb := range h.members {
			if mb.pod.UID != "" {
				h.setEgress(mb)
				if err := h.keep(mb); err != nil {
					h.Logger.Error("keeping a policy for the next start", "pod", mb.pod.String(), "error", err)
				}
			}
		}
		return h.keepCluster()
	})
}

// Stop implements takeover.Incumbent.
func (h holder) Stop(ctx context.Context) error {
	return h.do(ctx, func() error {
		h.stop()
		return nil
	})
}

// yield leaves the pods to another agent. Those captured by address stay: as long
// as this agent's address is one of its Service's, connections come in here too.
func (n *Node) yield() {
	if n.phase >= yielded {
		return
	}
	n.enter(yielded)
	close(n.yielded)
	n.Logger.Info("another agent serves; ending what is under way", "pods", len(n.members))
	n.left = map[string]*proxy.Pod{}
	for uid, mb := range n.members {
		if mb.captured != nil && mb.captured.Mode() != capture.Address {
			n.left[uid] = mb.proxied
			n.abandon(mb)
		}
	}
	n.settle()
}

// abandon ends what is under way of a pod that another agent serves.
func (n *Node) abandon(mb *member) {
	if err := mb.captured.Abandon(); err != nil {
		n.Logger.Error("letting go of a pod", "pod", mb.pod.String(), "error", err)
	}
	captured, proxied, record := mb.captured, mb.proxied, mb.journal
	mb.captured = nil // policies still reach what is proxied
	n.draining++
	n.unsettled++
	done := func(count *int) {
		ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
		defer cancel() // no loop, no need to know
		_ = n.do(ctx, func() error {
			*count--
			n.settle()
			return nil
		})
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), drainWithin)
		defer cancel()
		if err := proxied.Drain(ctx); err != nil {
			n.Logger.Info("connections were cut after the hand-over", "pod", mb.pod.String(), "error", err)
		}
		_ = captured.Release() // its network namespace
		// This agent answers for what is in flight until it is over, or this process
		// ends. Then its journal has the deadlines.
		over, err := proxied.SetPolicy(&meshv1.PodPolicy{Refuse: "another agent serves this pod"})
		if err == nil {
			record.Close()
		}
		done(&n.draining)
		if err == nil {
			<-over
		}
		done(&n.unsettled)
	}()
}

// settle notes when nothing is under way any more.
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

// retireJournal removes the journal after a takeover. An agent that ends without one
// leaves it: its successor reads there that nothing is in flight.
func (n *Node) retireJournal() {
	if n.phase == stopped {
		return
	}
	if err := n.Journal.Retire(); err != nil {
		n.Logger.Error("failed to remove the journal", "error", err)
	}
}

// byAddress says whether a pod is captured by address.
func (n *Node) byAddress() bool {
	for _, mb := range n.members {
		if mb.captured != nil && mb.captured.Mode() == capture.Address {
			return true
		}
	}
	return false
}

// stop leaves the redirections in place: until the next agent listens, members
// are refused, and nothing goes around the mesh. Those that fail open go direct.
func (n *Node) stop() {
	if n.phase == stopped {
		return
	}
	before := n.phase
	n.enter(stopped)
	var proxied []*proxy.Pod
	for _, mb := range n.members {
		if mb.proxied != nil {
			proxied = append(proxied, mb.proxied)
		}
		mb.captured, mb.proxied = nil, nil
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

// shutdown ends what is under way of pods, all at once.
func shutdown(all []*proxy.Pod) {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
	defer cancel()
	var wg sync.WaitGroup
	for _, p := range all {
		wg.Go(func() { _ = p.Shutdown(ctx) })
	}
	wg.Wait()
}

// Linger keeps an agent that is told to end until it is of no use any more: a
// successor has taken over and nothing is under way, or none came.
func (n *Node) Linger() {
	ctx, cancel := context.WithTimeout(context.Background(), endWithin)
	defer cancel()
	addressed := time.After(addressWait)
	select {
	case <-n.yielded:
	case <-time.After(successorWait):
		offered := false
		if n.do(ctx, func() error { offered = n.phase == handing; return nil }) != nil || !offered {
			return
		}
		select {
		case <-n.yielded:
		case <-ctx.Done():
			return
		}
	}
	select {
	case <-n.drained:
		return
	case <-addressed:
	}
	_ = n.do(ctx, func() error {
		n.enter(leaving)
		for _, mb := range n.members {
			if mb.captured != nil {
				n.abandon(mb)
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
