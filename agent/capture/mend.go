package capture

import (
	"cmp"
	"context"
	"time"
)

const (
	// slowAfter is how long a pod takes that holds things up.
	slowAfter = time.Second
	// A pod that was mended waits for the next time, twice as long each time, for
	// the pod itself may be who does the damage. Nothing of it is remembered later.
	minMendInterval = time.Second
	maxMendInterval = time.Minute
)

// mending is a pod's redirection being made anew apart from the checks.
type mending struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// damaged notes, under node.mu, that the pod's redirection is not what it should be.
func (p *Pod) damaged(why error) {
	v := &p.vitals
	v.damage, v.found = why, cmp.Or(v.found, why)
	v.lost = &Loss{UID: p.name(), Mode: p.Mode(), Reason: v.found, Repair: why}
}

// mend makes the redirection of one damaged pod anew, if none is being mended.
func (n *node) mend(pods []*Pod) {
	var next *Pod
	for _, p := range pods {
		if m := p.mending; m != nil {
			select {
			case <-m.done:
				p.mended()
			default:
				return // the others wait their turn
			}
		}
		v := &p.vitals
		if v.damage != nil && time.Since(v.mended) >= v.mendInterval() && (next == nil || v.mends < next.vitals.mends) {
			next = p
		}
	}
	if next == nil {
		return
	}
	if v := &next.vitals; time.Since(v.mended) > 2*maxMendInterval {
		v.mends = 0
	}
	ctx, cancel := context.WithCancel(context.Background())
	m := &mending{cancel: cancel, done: make(chan struct{})}
	next.mending = m
	go func() {
		defer close(m.done)
		defer cancel()
		m.err = next.redirector.redirect(ctx, next)
	}()
}

// mended notes what has become of it. Whether it helped, the next probe shows.
func (p *Pod) mended() {
	v, err := &p.vitals, p.mending.err
	p.mending = nil
	v.mends, v.mended = v.mends+1, time.Now()
	if err != nil {
		p.damaged(err)
		return
	}
	v.damage = nil
}

// stopMending waits, under node.mu, until nothing of the pod is being changed.
func (p *Pod) stopMending() {
	if p.mending == nil {
		return
	}
	p.mending.cancel()
	<-p.mending.done
	p.mending = nil
}

func (v *vitals) mendInterval() time.Duration {
	if v.mends == 0 {
		return 0
	}
	return min(minMendInterval<<min(v.mends-1, 16), maxMendInterval)
}
