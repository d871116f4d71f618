package capture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// rotation is how long it takes to look at all captured pods once, and the time between
	// two audits of what no probe shows.
	rotation = time.Second
	// provenRotations is how many rotations pass between two probes of a pod while what the kernel holds
	// of it does not change.
	provenRotations = 30
	// patience is how long a probe may take to connect, and landing how long to arrive if it
	// has connected: then the kernel knows where to.
	patience = time.Second
	landing  = 200 * time.Millisecond
	// moment is how long a check waits for the probe of the agent's own pod, which arrives at
	// once unless the processors are busy.
	moment = 50 * time.Millisecond
	// attempts is how many probes in a row fail before a redirection counts as lost.
	attempts = 2
	// stallAfter is how long a probe may wait to be accepted before its pod, if it
	// fails open, goes direct. The hook waits as long for the agent's sign of life.
	stallAfter = 2 * time.Second
	// repairBudget bounds the repairs in one check, because there is no sign of life
	// meanwhile. The next check continues.
	repairBudget = 500 * time.Millisecond
)

// health checks and repairs the redirections in force. It keeps their state between checks.
type health struct {
	node *node

	mu sync.Mutex
	// own is a pod that runs nothing, written also under node.mu. Through it a node without
	// pods is checked too, and the agent gives its sign of life.
	own     *Pod
	to      netip.AddrPort // destination of its probes
	probing []*Pod         // those with a probe under way when the last check ended
	damaged atomic.Bool    // a pod's redirection was, at the last check, or its probe had failed
	lapsed  bool           // no agent gave a sign of life for so long that pods may have gone direct
	probed  time.Time      // when captured pods were probed last
	audited time.Time
	audits  map[Mode]Loss // what is wrong and could not be repaired
	// repaired is when the redirectors' shared parts were repaired last. Probes that began
	// earlier fail by what was repaired, and prove nothing.
	repaired time.Time
}

// status is the state of one pod's redirection.
type status struct {
	awaited atomic.Pointer[probe] // what the listeners wait for

	// Under health.mu:
	probe   *probe // under way
	began   time.Time
	looked  time.Time // whether a probe is due
	proof   *uint32   // the redirection's state at the last probe, if that arrived and it was known
	failed  int       // probes in a row
	excused bool      // one of them does not count, because it began before a repair
	reason  error     // why they failed, once a repair was tried
	lost    *Loss     // that repair had no effect

	// Under node.mu:
	direct bool // the pod may have direct connections
	// Of a pod that is repaired concurrently with the checks:
	damage   error // what to repair
	repairs  int   // in a row
	repaired time.Time
}

// end closes the probe under way.
func (s *status) end() {
	s.awaited.Store(nil)
	_ = unix.Close(s.probe.fd)
	s.probe = nil
}

// check waits for no pod: a later check reads the results of its probes.
func (h *health) check(repair bool) []Loss {
	h.mu.Lock()
	defer h.mu.Unlock()

	// The lock may be held for seconds, while the rules of many pods change. The sign of
	// life must not wait for that; the rest can.
	locked := h.node.mu.TryLock()
	if locked {
		defer h.node.mu.Unlock()
		if h.node.closed || len(h.node.destinations) == 0 {
			return nil
		}
		h.to = h.node.destinations[0]
		if err := h.captureOwn(); err != nil {
			return []Loss{{Mode: h.node.modes[0].mode, Reason: err, Repair: errors.New("the redirection cannot be checked")}}
		}
	}
	h.beat()
	if !locked || !repair {
		return nil
	}
	return h.repairLosses()
}

// beat gives a sign of life once the probe of the agent's own pod has arrived.
func (h *health) beat() {
	own := h.own
	if own == nil {
		return
	}
	if own.status.probe == nil {
		h.begin([]*Pod{own})
	}
	pr := own.status.probe
	if pr == nil {
		return
	}
	if h.acceptOwn(); !pr.arrived.Load() {
		h.awaitOwn()
		h.acceptOwn()
	}
	if !pr.arrived.Load() {
		return
	}
	for _, m := range h.node.modes {
		if m.Beat() {
			h.lapsed = true
			h.node.cfg.Lapsed()
		}
	}
}

// repairLosses repairs what audits and probes show, and begins the next probes. It is called
// under node.mu.
func (h *health) repairLosses() []Loss {
	if h.lapsed {
		for _, p := range h.node.pods {
			p.noteLapse()
		}
		h.lapsed = false
	}
	start := time.Now()
	losses := h.audit(start)
	pods := h.node.all()
	for _, p := range h.probing {
		if p.status.probe != nil && p != h.own && !p.isCurrent() {
			p.status.end() // released meanwhile
		}
	}
	for _, p := range pods {
		if p.status.probe != nil && time.Since(start) < repairBudget {
			if repaired := h.examine(p); repaired != nil {
				losses = append(losses, *repaired)
			}
		}
		if p.status.lost != nil {
			losses = append(losses, *p.status.lost)
		}
	}
	h.endDirect(pods, start.Add(repairBudget))
	h.repairNext(pods)
	h.begin(h.due(pods, start))
	h.damaged.Store(slices.ContainsFunc(pods, func(p *Pod) bool { return p.status.damage != nil || p.status.failed > 0 }))
	h.probing = slices.DeleteFunc(pods, func(p *Pod) bool { return p.status.probe == nil })
	return losses
}

// CheckInterval implements Backend. It does not wait for node.mu, nor does the sign of life.
func (n *node) CheckInterval() time.Duration {
	if n.health.damaged.Load() {
		return urgentInterval
	}
	return calmInterval
}

// all returns the captured pods and, first, the agent's own.
func (n *node) all() []*Pod {
	pods := make([]*Pod, 0, len(n.pods)+1)
	if own := n.health.own; own != nil {
		pods = append(pods, own)
	}
	return slices.AppendSeq(pods, maps.Values(n.pods))
}

// due returns the pods to probe now: those whose probe failed, and of a share of the others by the time since
// the last check, those whose redirection the last probe does not prove any more.
func (h *health) due(pods []*Pod, now time.Time) []*Pod {
	var due, others []*Pod
	for _, p := range pods {
		switch s := &p.status; {
		case s.probe != nil || p == h.own && s.failed == 0:
		case s.failed > 0:
			due = append(due, p)
		default:
			others = append(others, p)
		}
	}
	since := min(now.Sub(h.probed), h.node.rotation)
	h.probed = now
	slices.SortFunc(others, func(a, b *Pod) int { return a.status.looked.Compare(b.status.looked) })
	share := int(int64(len(h.node.pods)) * int64(since) / int64(h.node.rotation))
	for _, p := range others[:min(share+1, len(others))] {
		p.status.looked = now
		if now.Sub(p.status.began) >= provenRotations*h.node.rotation || !p.proven() {
			due = append(due, p)
		}
	}
	return due
}

// proven reports, under node.mu, whether the last probe arrived, and nothing is known to have changed since.
func (p *Pod) proven() bool {
	s := &p.status
	if s.proof == nil || s.reason != nil || s.damage != nil {
		return false
	}
	state, known := p.redirector.State(p.target())
	return known && state == *s.proof
}

// audit checks what no probe shows, and repairs it.
func (h *health) audit(now time.Time) []Loss {
	var losses []Loss
	if now.Sub(h.audited) >= h.node.rotation {
		h.audited = now
		h.audits = map[Mode]Loss{}
		for _, m := range h.node.modes {
			pods := h.node.captured(m.mode)
			reason := m.check(pods)
			if reason == nil {
				continue
			}
			loss := Loss{Mode: m.mode, Reason: reason, Repair: errors.Join(m.Repair(h.node.destinations, intact(pods)), m.check(pods))}
			if loss.Repair == nil {
				losses = append(losses, loss)
				h.repaired = time.Now()
				for _, p := range pods {
					p.noteLoss()
				}
			} else {
				h.audits[m.mode] = loss
			}
		}
	}
	return slices.AppendSeq(losses, maps.Values(h.audits))
}

// check checks what no probe of these pods shows. It notes which pods are damaged, and
// returns what else is wrong.
func (m openMode) check(pods []*Pod) error {
	failed, err := m.Check(intact(pods))
	for _, p := range pods {
		if why := failed[p.known.UID]; why != nil {
			p.status.damage, p.status.reason = why, cmp.Or(p.status.reason, why)
		}
	}
	return err
}

// examine checks the result of the pod's probe and repairs what kept it from arriving. It
// returns the loss that was certainly repaired, nil if there is none.
func (h *health) examine(p *Pod) (repaired *Loss) {
	s := &p.status
	pr := s.probe
	arrived, waits, pending := p.outcome(pr)
	switch {
	case pending:
	case arrived && s.damage != nil: // there may be other damage
		s.end()
		s.failed = 0
	case arrived:
		return h.arrived(p)
	case waits:
		if time.Since(pr.began) > stallAfter {
			h.setStalled(p, true)
		}
		if pr.err != nil {
			s.end()
		}
	case p.known.Stalled:
		// The probe went direct, or was dropped, because of that.
		s.end()
		h.setStalled(p, false)
	default:
		h.failed(p)
	}
	return nil
}

// outcome returns whether a probe has arrived, or waits to be accepted; pending: that is not
// decided yet.
func (p *Pod) outcome(pr *probe) (arrived, waits, pending bool) {
	if pr.err == nil {
		if code, err := unix.GetsockoptInt(pr.fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && code != 0 {
			pr.err = unix.Errno(code)
		}
	}
	switch {
	case pr.arrived.Load():
		return true, false, false
	case pr.err == nil && time.Since(pr.began) <= pr.patience():
		return false, false, true
	}
	arrived, waits = p.landed(pr)
	return arrived || pr.arrived.Load(), waits, false
}

// arrived handles a probe that arrived. It returns the loss that is repaired by then, nil if
// there is none.
func (h *health) arrived(p *Pod) (repaired *Loss) {
	s := &p.status
	if s.reason != nil {
		p.noteLoss()
		if s.lost == nil {
			repaired = p.loss(nil)
		}
	}
	s.proof = s.probe.state
	s.end()
	s.failed, s.excused, s.reason, s.lost = 0, false, nil, nil
	h.setStalled(p, false)
	return repaired
}

// failed handles a probe that did not arrive.
func (h *health) failed(p *Pod) {
	s := &p.status
	why := s.probe.err
	if why == nil {
		why = fmt.Errorf("no answer within %s", s.probe.patience())
	}
	reason := fmt.Errorf("a connection to %s did not arrive at the agent: %w", h.destinationOf(p), why)
	outdated := s.damage != nil || s.probe.began.Before(s.repaired)
	excused := !s.excused && s.probe.began.Before(h.repaired)
	s.end()
	if s.excused = s.excused || excused; outdated || excused {
		return
	}
	if s.failed++; s.failed < attempts {
		return
	}
	s.failed = attempts // it is probed in every check until a probe arrives
	if s.reason != nil {
		s.lost = p.loss(reason)
	}
	s.reason = cmp.Or(s.reason, reason)
	if p.mode == IPTables {
		s.damage = reason
		return
	}
	if err := errors.Join(p.redirector.Repair(h.node.destinations, nil), p.redirector.Apply(context.Background(), p.target())); err != nil {
		s.lost = p.loss(err)
	} else if p == h.own {
		h.repaired = time.Now()
		for _, q := range h.node.captured(p.mode) {
			q.noteLoss()
		}
	}
}

// setStalled notes whether the pod's connections are accepted. If it fails open and they
// are not, the hook lets them go direct.
func (h *health) setStalled(p *Pod, stalled bool) {
	if p.known.Stalled == stalled {
		return
	}
	p.known.Stalled = stalled
	if stalled {
		h.node.cfg.Logger.Warn("the connections of a pod are not accepted", "pod", p.known.UID, "fail_open", p.known.FailOpen)
	}
	if err := p.updateHook(); err != nil {
		h.node.cfg.Logger.Error("failed to update the redirection of a stalled pod", "pod", p.known.UID, "error", err)
	}
	if !stalled {
		p.noteLapse()
	}
}

// close ends all probes and the agent's own pod.
func (h *health) close() []error {
	for _, p := range h.probing {
		if p.status.probe != nil {
			p.status.end()
		}
	}
	own := h.own
	if own == nil {
		return nil
	}
	h.own = nil
	own.stopRepair()
	return []error{own.redirector.Release(own.target()), own.closeFiles()}
}
