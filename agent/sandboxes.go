package agent

import (
	"context"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/nri"
)

// sandboxes brings the runtime's word into the loop.
type sandboxes struct{ *mesh }

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
			mb.fresh, mb.since = true, time.Now()
			s.captureThese(map[string]bool{b.Pod.UID: true})
		}
		if mb.captured != nil {
			s.metrics.enrolmentSeconds.Observe(time.Since(start).Seconds())
		}
		return nil
	})
	if err != nil {
		s.logger.Error("a pod starts before it is captured: until it is, it is refused", "pod", b.Pod.String(), "error", err)
	}
}

// Stopped implements nri.Handler: listeners would keep the network namespace.
func (s sandboxes) Stopped(ctx context.Context, b nri.Sandbox) {
	_ = s.do(ctx, func() error {
		mb := s.members[b.Pod.UID]
		if mb == nil || mb.sandbox != "" && mb.sandbox != b.ID || s.phase != serving {
			return nil
		}
		if mb.captured != nil {
			// Its process may live a moment longer, and is not to be found again.
			mb.stopped = mb.netns
			s.release(mb)
		}
		mb.since = time.Time{}
		return nil
	})
}

// Known implements nri.Handler.
func (s sandboxes) Known(ctx context.Context, all []nri.Sandbox) {
	_ = s.do(ctx, func() error {
		if s.phase != serving {
			return nil
		}
		for _, b := range all {
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
	mb.sandbox, mb.stopped = b.ID, 0
	return mb
}
