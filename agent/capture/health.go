package capture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// rotation is how long it takes to probe all captured pods once, and how often it
	// is looked at what no probe shows.
	rotation = time.Second
	// patience is how long a probe may take to arrive.
	patience = time.Second
	// attempts is how many probes fail before a redirection counts as lost.
	attempts = 2
	// stallAfter is how long a probe may wait to be accepted before its pod, if it
	// fails open, goes direct. The hook grants the whole agent as much.
	stallAfter = 2 * time.Second
	// mendingBudget is how long one check mends pods, for there is no sign of life
	// meanwhile. The others are the next check's.
	mendingBudget = 500 * time.Millisecond
)

// health is what is known of the redirections in force, between checks.
type health struct {
	mu sync.Mutex
	// own is a pod that runs nothing. Through it a node without pods is checked
	// too, and the agent shows that it lives.
	own     *Pod
	to      netip.AddrPort // where own's probes go
	probing []*Pod         // with a probe under way when the last check ended
	slept   bool           // there was none, by any agent, for so long that pods may have gone direct
	probed  time.Time      // when captured pods were probed last
	audited time.Time
	audits  map[Mode]Loss // what is wrong, and not mended
	// repaired is when what pods share was put in force again. What earlier probes
	// ran into says nothing of it, and was told of.
	repaired time.Time
}

// vitals is what is known of one pod's redirection.
type vitals struct {
	awaited atomic.Pointer[probe] // by who accepts

	// The rest is health.mu's.
	probe   *probe // under way
	began   time.Time
	failed  int   // probes in a row
	excused bool  // one of them was, for it began before a repair
	found   error // why they did, once it was tried to mend it
	lost    *Loss // it was not mended by that

	// Of a pod that is mended apart from the checks:
	damage error     // what there is to mend
	mends  int       // in a row
	mended time.Time // last
}

// end closes the probe under way.
func (v *vitals) end() {
	v.awaited.Store(nil)
	_ = unix.Close(v.probe.fd)
	v.probe = nil
}

// Check waits for nothing: what became of a probe, a later check sees.
func (n *node) Check(mend bool) []Loss {
	h := &n.health
	h.mu.Lock()
	defer h.mu.Unlock()

	// The lock may be held for seconds, while rules are written for many pods. A
	// sign of life must not wait for that; the rest can be done next time.
	locked := n.mu.TryLock()
	if locked {
		defer n.mu.Unlock()
		if n.closed || len(n.destinations) == 0 {
			return nil
		}
		h.to = n.destinations[0]
		if err := n.makeOwn(); err != nil {
			return []Loss{{Mode: n.redirectors[0].mode(), Reason: err, Repair: errors.New("the redirection cannot be checked")}}
		}
	}
	n.showLife()
	if !locked || !mend {
		return nil
	}
	return n.mendLosses()
}

// showLife gives a sign of life once the probe of the agent's own pod has arrived.
func (n *node) showLife() {
	h := &n.health
	own := h.own
	if own == nil {
		return
	}
	if own.vitals.probe == nil {
		n.begin([]*Pod{own})
	}
	own.acceptOwn()
	if pr := own.vitals.probe; pr == nil || !pr.arrived.Load() {
		return
	}
	for _, w := range n.redirectors {
		h.slept = w.beat() || h.slept
	}
}

// mendLosses repairs what audits and probes show, and begins the next probes. It is called
// under node.mu.
func (n *node) mendLosses() []Loss {
	h := &n.health
	if h.slept {
		for _, p := range n.pods {
			p.comeBack()
		}
		h.slept = false
	}
	start := time.Now()
	losses := n.audit(start)
	pods := n.all()
	for _, p := range h.probing {
		if p.vitals.probe != nil && p != h.own && n.pods[p.uid.String()] != p {
			p.vitals.end() // released meanwhile
		}
	}
	for _, p := range pods {
		if p.vitals.probe != nil && time.Since(start) < mendingBudget {
			if mended := n.examine(p); mended != nil {
				losses = append(losses, *mended)
			}
		}
		if p.vitals.lost != nil {
			losses = append(losses, *p.vitals.lost)
		}
	}
	n.endDirect(pods, start.Add(mendingBudget))
	n.mend(pods)
	n.begin(n.due(pods, start))
	h.probing = slices.DeleteFunc(pods, func(p *Pod) bool { return p.vitals.probe == nil })
	return losses
}

// all are the captured pods and, first, the agent's own.
func (n *node) all() []*Pod {
	pods := make([]*Pod, 0, len(n.pods)+1)
	if n.health.own != nil {
		pods = append(pods, n.health.own)
	}
	for _, p := range n.pods {
		pods = append(pods, p)
	}
	return pods
}

// due are the pods to be probed now: those whose probe failed, and as many
// others as the time since the last check asks for, the longest unseen first.
func (n *node) due(pods []*Pod, now time.Time) []*Pod {
	var due, others []*Pod
	for _, p := range pods {
		switch v := &p.vitals; {
		case v.probe != nil || p == n.health.own && v.failed == 0:
		case v.failed > 0:
			due = append(due, p)
		default:
			others = append(others, p)
		}
	}
	since := min(now.Sub(n.health.probed), n.rotation)
	n.health.probed = now
	slices.SortFunc(others, func(a, b *Pod) int { return a.vitals.began.Compare(b.vitals.began) })
	share := int(int64(len(n.pods)) * int64(since) / int64(n.rotation))
	return append(due, others[:min(share+1, len(others))]...)
}

// audit looks at what no probe shows, and mends it.
func (n *node) audit(now time.Time) []Loss {
	h := &n.health
	var losses []Loss
	if now.Sub(h.audited) >= n.rotation {
		h.audited = now
		h.audits = map[Mode]Loss{}
		for _, w := range n.redirectors {
			pods := n.captured(w)
			reason := w.check(pods)
			if reason == nil {
				continue
			}
			loss := Loss{Mode: w.mode(), Reason: reason, Repair: errors.Join(w.repair(n.destinations, pods), w.check(pods))}
			if loss.Repair == nil {
				losses = append(losses, loss)
				h.repaired = time.Now()
				for _, p := range pods {
					p.recaptured()
				}
			} else {
				h.audits[w.mode()] = loss
			}
		}
	}
	for _, loss := range h.audits {
		losses = append(losses, loss)
	}
	return losses
}

// examine checks the result of the pod's probe and repairs what kept it from arriving. It
// returns the loss that it certainly repaired, nil if there is none.
func (n *node) examine(p *Pod) (mended *Loss) {
	v := &p.vitals
	pr := v.probe
	arrived, waits, pending := p.outcome(pr)
	switch {
	case pending:
	case arrived && v.damage != nil: // it may not be all there is
		v.end()
		v.failed = 0
	case arrived:
		return n.arrived(p)
	case waits:
		if time.Since(pr.began) > stallAfter {
			n.setStalled(p, true)
		}
		if pr.err != nil {
			v.end()
		}
	case p.stalled:
		// It was, and the probe went direct or was thrown away meanwhile.
		v.end()
		n.setStalled(p, false)
	default:
		n.failed(p)
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
	case pr.err == nil && time.Since(pr.began) <= patience:
		return false, false, true
	}
	arrived, waits = p.landed(pr)
	return arrived, waits, false
}

// arrived handles a probe that arrived. It returns the loss that is repaired by then, nil if
// there is none.
func (n *node) arrived(p *Pod) (mended *Loss) {
	v := &p.vitals
	if v.found != nil {
		p.recaptured()
		if v.lost == nil {
			mended = &Loss{UID: p.name(), Mode: p.Mode(), Reason: v.found}
		}
	}
	v.end()
	v.failed, v.excused, v.found, v.lost = 0, false, nil, nil
	n.setStalled(p, false)
	return mended
}

// failed is for a probe that did not arrive.
func (n *node) failed(p *Pod) {
	v := &p.vitals
	reason := v.probe.err
	if reason == nil {
		reason = fmt.Errorf("a connection to %s did not arrive at the agent within %s", n.target(p), patience)
	} else {
		reason = fmt.Errorf("a connection to %s did not arrive at the agent: %w", n.target(p), reason)
	}
	outdated := v.damage != nil || v.probe.began.Before(v.mended)
	excused := !v.excused && v.probe.began.Before(n.health.repaired)
	v.end()
	if v.excused = v.excused || excused; outdated || excused {
		return
	}
	if v.failed++; v.failed < attempts {
		return
	}
	v.failed = attempts // and so on until one arrives
	if v.found != nil {
		v.lost = &Loss{UID: p.name(), Mode: p.Mode(), Reason: v.found, Repair: reason}
	}
	v.found = cmp.Or(v.found, reason)
	if p.redirector.slow() {
		v.damage = reason
		return
	}
	if err := errors.Join(p.redirector.repair(n.destinations, nil), p.redirector.redirect(context.Background(), p)); err != nil {
		v.lost = &Loss{UID: p.name(), Mode: p.Mode(), Reason: v.found, Repair: err}
	} else if p == n.health.own {
		n.health.repaired = time.Now()
	}
}

// setStalled tells the hook whether the pod's connections are taken at all.
func (n *node) setStalled(p *Pod, stalled bool) {
	if p.stalled == stalled {
		return
	}
	p.stalled = stalled
	if stalled {
		n.cfg.Logger.Warn("the pod's connections are not accepted", "pod", p.uid, "fail_open", p.failOpen)
	}
	if err := p.redirector.setFailOpen(p); err != nil {
		n.cfg.Logger.Error("telling the hook whether the pod's connections are accepted", "pod", p.uid, "error", err)
	}
	if !stalled {
		p.comeBack()
	}
}

// closeHealth ends all probes and the agent's own pod.
func (n *node) closeHealth() []error {
	for _, p := range n.health.probing {
		if p.vitals.probe != nil {
			p.vitals.end()
		}
	}
	own := n.health.own
	if own == nil {
		return nil
	}
	n.health.own = nil
	return []error{own.redirector.release(own), own.closeFiles()}
}
