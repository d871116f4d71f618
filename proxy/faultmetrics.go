package proxy

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
)

// faultMetrics counts injected faults. Rules come and go, and so do their series.
type faultMetrics struct {
	injected *prometheus.CounterVec

	mu   sync.Mutex
	held map[faultSeries]int // by the number of pods whose policy has the rule
}

// faultSeries are those of one rule.
type faultSeries struct{ namespace, workload, shard, injection, rule string }

func (s faultSeries) labels() prometheus.Labels {
	return prometheus.Labels{
		"namespace": s.namespace, "workload": s.workload, "shard": s.shard, "injection": s.injection, "rule": s.rule,
	}
}

// harmed counts a fault, unless the rule is gone by now.
func (m *metrics) harmed(s faultSeries, k fault.Kind) {
	m.faults.mu.Lock()
	defer m.faults.mu.Unlock()
	if m.faults.held[s] > 0 {
		labels := s.labels()
		labels["kind"] = k.String()
		m.faults.injected.With(labels).Inc()
	}
}

// exchange holds the series of a policy's rules, and lets go of another's. Either may
// be nil.
func (m *faultMetrics) exchange(hold, release *policy) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held == nil {
		m.held = map[faultSeries]int{}
	}
	for s := range hold.faultSeries() {
		m.held[s]++
	}
	for s := range release.faultSeries() {
		if m.held[s]--; m.held[s] == 0 {
			delete(m.held, s)
			m.injected.DeletePartialMatch(s.labels())
		}
	}
}

func (p *policy) faultSeries() map[faultSeries]struct{} {
	if p == nil {
		return nil
	}
	out := map[faultSeries]struct{}{}
	for name := range p.faults.Names() {
		out[faultSeries{p.pod.info.Namespace, p.workload, p.shard, name.Injection, name.Rule}] = struct{}{}
	}
	return out
}

// enforceFaults lets a new policy's rules take the place of those of the old one.
func (p *Pod) enforceFaults(old, next *policy) {
	next.faults.Enforce(time.Now())
	p.histories.enforce(next)
	p.server.metrics.faults.exchange(next, old)
}

// forgetFaults lets go of the series of a pod that is gone.
func (p *Pod) forgetFaults() { p.server.metrics.faults.exchange(nil, p.policy.Load()) }
