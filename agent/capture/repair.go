package capture

import (
	"cmp"
	"context"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
)

const (
	// slowAfter is how long a pod's rules take to change that delays other pods.
	slowAfter = time.Second
	// The time between two repairs of a pod doubles with each: the pod itself may do the
	// damage. After a time without repairs it starts over.
	minRepairInterval = time.Second
	maxRepairInterval = time.Minute
)

// repairing is the repair of one pod's redirection, concurrently with the checks.
type repairing struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// setDamage notes, under node.mu, that the pod's redirection must be repaired.
func (p *Pod) setDamage(why error) {
	s := &p.status
	s.damage, s.reason = why, cmp.Or(s.reason, why)
	s.lost = p.loss(why)
}

// loss returns the pod's loss with why it is not repaired; nil: it is.
func (p *Pod) loss(why error) *Loss {
	return &Loss{UID: nameOf(p.known.UID), Mode: p.mode, Reason: p.status.reason, Repair: why}
}

// repairNext starts to repair one damaged pod, unless a repair runs.
func (h *health) repairNext(pods []*Pod) {
	var next *Pod
	for _, p := range pods {
		if r := p.repair; r != nil {
			select {
			case <-r.done:
				p.endRepair()
			default:
				return
			}
		}
		s := &p.status
		if s.damage != nil && time.Since(s.repaired) >= s.repairInterval() && (next == nil || s.repairs < next.status.repairs) {
			next = p
		}
	}
	if next == nil {
		return
	}
	if s := &next.status; time.Since(s.repaired) > 2*maxRepairInterval {
		s.repairs = 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), iptables.Timeout) // other pods wait for their repair
	r := &repairing{cancel: cancel, done: make(chan struct{})}
	next.repair = r
	target := next.target()
	go func() {
		defer close(r.done)
		defer cancel()
		r.err = next.redirector.Apply(ctx, target)
	}()
}

// endRepair notes the result of a repair. The next probe shows whether it had effect.
func (p *Pod) endRepair() {
	s, err := &p.status, p.repair.err
	p.repair = nil
	s.repairs, s.repaired = s.repairs+1, time.Now()
	if err != nil {
		p.setDamage(err)
		return
	}
	s.damage = nil
}

// stopRepair waits, under node.mu, until the pod's repair has ended.
func (p *Pod) stopRepair() {
	if p.repair == nil {
		return
	}
	p.repair.cancel()
	<-p.repair.done
	p.repair = nil
}

func (s *status) repairInterval() time.Duration {
	if s.repairs == 0 {
		return 0
	}
	return min(minRepairInterval<<min(s.repairs-1, 16), maxRepairInterval)
}
