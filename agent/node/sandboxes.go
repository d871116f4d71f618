package node

import (
	"context"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/nri"
)

// sandboxes brings the events of the runtime into the loop.
type sandboxes struct{ *Node }

// Sandboxes returns the handler of the container runtime's events.
func (n *Node) Sandboxes() nri.Handler { return sandboxes{n} }

// Started implements nri.Handler: the pod is captured before it has a container.
func (s sandboxes) Started(ctx context.Context, b nri.Sandbox) {
	start := time.Now()
	err := s.do(ctx, func() error {
		if s.phase != serving {
			return nil
		}
		mb := s.enrol(b)
		if mb.captured != nil { // it was found first, or has had a sandbox before
			s.lookAt(map[string]bool{b.Pod.UID: true})
		}
		if mb.captured == nil {
			mb.fresh, mb.since, mb.starting = true, time.Now(), true
			mb.pod.Addresses = b.Pod.Addresses
			s.captureThese(map[string]bool{b.Pod.UID: true})
			mb.starting = false
		}
		if mb.captured != nil {
			s.Metrics.Enrolled(time.Since(start))
		}
		return nil
	})
	if err != nil {
		s.Logger.Error("a pod starts before it is captured: until it is, it is refused", "pod", b.Pod.String(), "error", err)
	}
}

// Stopped implements nri.Handler: listeners would keep the network namespace. A
// pod's earlier sandboxes stop too, when they are thrown away. The runtime removes the
// pod's network afterwards, so the responses to its last writes are awaited first.
func (s sandboxes) Stopped(ctx context.Context, b nri.Sandbox) {
	var over <-chan struct{}
	err := s.do(ctx, func() error {
		mb := s.members[b.Pod.UID]
		if mb == nil || mb.sandbox != b.ID || s.phase != serving {
			return nil
		}
		if in, err := s.inCaptured(mb); in || err != nil {
			return err // the pod watch will tell
		}
		if over = s.release(mb); mb.pod.HostNetwork {
			over = nil // its network stays
		}
		mb.sandbox, mb.since = "", time.Time{}
		return nil
	})
	if err != nil || done(over) {
		return
	}
	select {
	case <-over:
	case <-time.After(shutdownGrace):
	case <-ctx.Done():
	}
}

// inCaptured says whether a process of the pod is in its captured network namespace.
func (n *Node) inCaptured(mb *member) (bool, error) {
	found, err := n.Locator.Find(map[string]bool{mb.pod.UID: true})
	if err != nil {
		return false, err
	}
	ns, err := n.Locator.Open(mb.pod.UID, found[mb.pod.UID].PIDs, mb.pod.HostNetwork, mb.netns)
	if err != nil || ns == nil {
		return false, err
	}
	defer ns.Close()
	return ns.Inode == mb.netns, nil
}

// Known implements nri.Handler. Sandboxes that ended long ago are among all: of a
// pod with several, it is not known which is its own.
func (s sandboxes) Known(ctx context.Context, all []nri.Sandbox) {
	_ = s.do(ctx, func() error {
		if s.phase != serving {
			return nil
		}
		of := map[string]int{}
		for _, b := range all {
			of[b.Pod.UID]++
		}
		for _, b := range all {
			if of[b.Pod.UID] > 1 {
				b.ID = ""
			}
			s.enrol(b)
		}
		s.captureMissing()
		return nil
	})
}

// enrol makes the pod of a sandbox a member.
func (s sandboxes) enrol(b nri.Sandbox) *member {
	mb := s.members[b.Pod.UID]
	if mb == nil {
		mb = &member{since: time.Now()}
		s.members[b.Pod.UID] = mb
	}
	if mb.pod.UID == "" || mb.restored {
		mb.pod, mb.restored, mb.told = b.Pod, false, time.Now()
	}
	if len(mb.pod.Addresses) == 0 {
		mb.pod.Addresses = b.Pod.Addresses
	}
	mb.sandbox = b.ID
	return mb
}
