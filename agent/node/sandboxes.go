package node

import (
	"context"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/nri"
)

// sandboxes brings the events of the runtime into the loop.
type sandboxes struct{ *Node }

// Sandboxes returns the handler of the container runtime's events.
func (n *Node) Sandboxes() nri.Handler { return sandboxes{n} }

// Started implements nri.Handler: the pod is captured before it has a container.
func (s sandboxes) Started(ctx context.Context, b nri.Sandbox) {
	start := time.Now()
	err := s.run(ctx, func() {
		if s.phase != serving {
			return
		}
		uid := b.Pod.UID
		p := s.announce(b)
		if p.redirection.captured != nil { // it was found first, or has had a sandbox before
			s.capturer.checkSandboxesOf(map[string]bool{uid: true})
		}
		if p.redirection.captured == nil {
			p.assignment.fresh, p.since = true, time.Now()
			p.info.Addresses = b.Pod.Addresses
			s.capturer.captureAll(map[string]bool{uid: true}, true)
		}
		if p.redirection.captured != nil {
			s.Metrics.Enrolled(time.Since(start))
		}
	})
	if err != nil {
		s.Logger.Error("a pod starts before it is captured: its connections are refused until then", "pod", b.Pod.String(), "error", err)
	}
}

// Stopped implements nri.Handler. It ends the capture, because open listeners would keep the
// network namespace. The runtime removes the pod's network afterwards, so Stopped waits for
// the responses to the pod's last writes. The runtime also stops the earlier sandboxes of a
// pod, when it removes them; these are ignored.
func (s sandboxes) Stopped(ctx context.Context, b nri.Sandbox) {
	var over <-chan struct{}
	err := s.do(ctx, func() error {
		p := s.pods[b.Pod.UID]
		if p == nil || p.sandbox != b.ID || s.phase != serving {
			return nil
		}
		if in, err := s.capturer.inCaptured(p); in || err != nil {
			return err // the pod watch will report it
		}
		captured := p.redirection.captured != nil
		s.effects.handle(b.Pod.UID, p, lifecycle.SandboxExit)
		if captured && !p.info.HostNetwork { // else its network stays
			over = p.redirection.last
		}
		p.sandbox, p.since = "", time.Time{}
		return nil
	})
	if err != nil || inflight.Closed(over) {
		return
	}
	select {
	case <-over:
	case <-time.After(shutdownGrace):
	case <-ctx.Done():
	}
}

// Synchronize implements nri.Handler. all may include sandboxes that exited long ago. If a pod has
// several, it is not certain which one is current.
func (s sandboxes) Synchronize(ctx context.Context, all []nri.Sandbox) {
	_ = s.run(ctx, func() {
		if s.phase != serving {
			return
		}
		count := map[string]int{}
		for _, b := range all {
			count[b.Pod.UID]++
		}
		for _, b := range all {
			if count[b.Pod.UID] > 1 {
				b.ID = ""
			}
			_, known := s.pods[b.Pod.UID]
			if p := s.announce(b); !known {
				p.since = time.Time{} // it runs, or has exited: nothing is to be expected soon
			}
		}
		s.capturer.captureMissing()
	})
}

// announce notes that the runtime has a sandbox of a pod.
func (s sandboxes) announce(b nri.Sandbox) *pod {
	uid := b.Pod.UID
	p := s.pods[uid]
	if p == nil {
		p = newPod(b.Pod, lifecycle.Expected)
		s.pods[uid] = p
	}
	if p.state.Presence <= lifecycle.Restored {
		p.info, p.announced = b.Pod, time.Now()
	}
	if len(p.info.Addresses) == 0 {
		p.info.Addresses = b.Pod.Addresses
	}
	p.sandbox = b.ID
	s.effects.handle(uid, p, lifecycle.Announcement)
	return p
}
