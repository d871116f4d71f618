package proxy

import (
	"iter"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
)

// limitSeries are those of the policy's limits; nil has none.
func (p *policy) limitSeries() iter.Seq[ruleSeries] {
	return func(yield func(ruleSeries) bool) {
		if p == nil {
			return
		}
		for _, n := range p.rules.Names() {
			if !yield(p.series(n.Breaker, n.Rule)) {
				return
			}
		}
	}
}

// countLimited counts a request that a rule refused.
func (p *Pod) countLimited(under *policy, r *limit.Refusal) {
	p.server.metrics.limits.count(under.series(r.Breaker, r.Rule), r.Reason)
}

// enforceLimits lets a new policy's rules take the place of those of the old one.
func (p *Pod) enforceLimits(old, next *policy) {
	next.rules.Enforce(time.Now())
	p.server.metrics.limits.exchange(next.limitSeries(), old.limitSeries())
}

// forgetLimits lets go of the series of a pod that is gone.
func (p *Pod) forgetLimits() {
	p.server.metrics.limits.exchange((*policy)(nil).limitSeries(), p.policy.Load().limitSeries())
}

var breakersOpen = prometheus.NewDesc("ctrlmesh_breakers_open",
	"Pods of this node in which the breaker of a rule is not closed.",
	[]string{"namespace", "workload", "shard", "breaker", "rule"}, nil)

// openBreakers collects what is open when it is asked.
type openBreakers struct{ *Server }

// Describe implements prometheus.Collector.
func (openBreakers) Describe(to chan<- *prometheus.Desc) { to <- breakersOpen }

// Collect implements prometheus.Collector.
func (o openBreakers) Collect(to chan<- prometheus.Metric) {
	open := map[ruleSeries]int{}
	o.mu.Lock()
	for p := range o.pods {
		if pol := p.policy.Load(); pol != nil {
			for _, n := range p.limits.Opened() {
				open[pol.series(n.Breaker, n.Rule)]++
			}
		}
	}
	o.mu.Unlock()
	for s, n := range open {
		to <- prometheus.MustNewConstMetric(breakersOpen, prometheus.GaugeValue, float64(n), s.namespace, s.workload, s.shard, s.source, s.rule)
	}
}
