package proxy

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
)

// limitMetrics counts what rules refuse. Rules come and go, and so do their series.
type limitMetrics struct {
	refused *prometheus.CounterVec

	mu   sync.Mutex
	held map[limitSeries]int // by the number of pods whose policy has the rule
}

// limitSeries are those of one rule.
type limitSeries struct{ namespace, workload, shard, breaker, rule string }

func (s limitSeries) labels() prometheus.Labels {
	return prometheus.Labels{
		"namespace": s.namespace, "workload": s.workload, "shard": s.shard, "breaker": s.breaker, "rule": s.rule,
	}
}

func (p *policy) limitSeries(n limit.Name) limitSeries {
	return limitSeries{p.pod.info.Namespace, p.workload, p.shard, n.Breaker, n.Rule}
}

// countLimited counts a request that a rule refused, unless the rule is gone by now.
func (p *Pod) countLimited(under *policy, r *limit.Refusal) {
	s := under.limitSeries(limit.Name{Breaker: r.Breaker, Rule: r.Rule})
	m := &p.server.metrics.limits
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held[s] > 0 {
		labels := s.labels()
		labels["reason"] = r.Reason
		m.refused.With(labels).Inc()
	}
}

// exchange holds the series of a policy's rules, and lets go of another's. Either may
// be nil.
func (m *limitMetrics) exchange(hold, release *policy) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held == nil {
		m.held = map[limitSeries]int{}
	}
	if hold != nil {
		for _, n := range hold.rules.Names() {
			m.held[hold.limitSeries(n)]++
		}
	}
	if release == nil {
		return
	}
	for _, n := range release.rules.Names() {
		s := release.limitSeries(n)
		if m.held[s]--; m.held[s] == 0 {
			delete(m.held, s)
			m.refused.DeletePartialMatch(s.labels())
		}
	}
}

// enforceLimits lets a new policy's rules take the place of those of the old one.
func (p *Pod) enforceLimits(old, next *policy) {
	next.rules.Enforce(time.Now())
	p.server.metrics.limits.exchange(next, old)
}

// forgetLimits lets go of the series of a pod that is gone.
func (p *Pod) forgetLimits() { p.server.metrics.limits.exchange(nil, p.policy.Load()) }

var breakersOpen = prometheus.NewDesc("ctrlmesh_breakers_open",
	"Pods of this node in which the breaker of a rule is not closed.",
	[]string{"namespace", "workload", "shard", "breaker", "rule"}, nil)

// openBreakers collects what is open when it is asked.
type openBreakers struct{ *Server }

// Describe implements prometheus.Collector.
func (openBreakers) Describe(to chan<- *prometheus.Desc) { to <- breakersOpen }

// Collect implements prometheus.Collector.
func (o openBreakers) Collect(to chan<- prometheus.Metric) {
	open := map[limitSeries]int{}
	o.mu.Lock()
	for p := range o.pods {
		if pol := p.policy.Load(); pol != nil {
			for _, n := range p.limits.Opened() {
				open[pol.limitSeries(n)]++
			}
		}
	}
	o.mu.Unlock()
	for s, n := range open {
		to <- prometheus.MustNewConstMetric(breakersOpen, prometheus.GaugeValue, float64(n), s.namespace, s.workload, s.shard, s.breaker, s.rule)
	}
}
