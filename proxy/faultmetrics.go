package proxy

import (
	"iter"
	"time"
)

// faultSeries are those of the policy's faults; nil has none.
func (p *policy) faultSeries() iter.Seq[ruleSeries] {
	return func(yield func(ruleSeries) bool) {
		if p == nil {
			return
		}
		for n := range p.faults.Names() {
			if !yield(p.series(n.Injection, n.Rule)) {
				return
			}
		}
	}
}

// enforceFaults lets a new policy's rules take the place of those of the old one.
func (p *Pod) enforceFaults(old, next *policy) {
	next.faults.Enforce(time.Now())
	p.histories.enforce(next)
	p.server.metrics.faults.exchange(next.faultSeries(), old.faultSeries())
}

// forgetFaults lets go of the series of a pod that is gone.
func (p *Pod) forgetFaults() {
	p.server.metrics.faults.exchange((*policy)(nil).faultSeries(), p.policy.Load().faultSeries())
}
