package proxy

import (
	"iter"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// ruleMetrics counts what rules do to requests. Rules come and go, and so do their
// series.
type ruleMetrics struct {
	counts *prometheus.CounterVec
	source string // the label of whatever has the rule; the last label says what was done

	mu   sync.Mutex
	held map[ruleSeries]int // by the pods whose policy has the rule
}

// ruleSeries are those of one rule.
type ruleSeries struct{ namespace, workload, shard, source, rule string }

func (p *policy) series(source, rule string) ruleSeries {
	return ruleSeries{p.pod.info.Namespace, p.workload, p.shard, source, rule}
}

// count counts what a rule did, unless it is gone by now.
func (m *ruleMetrics) count(s ruleSeries, what string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held[s] > 0 {
		m.counts.WithLabelValues(s.namespace, s.workload, s.shard, s.source, s.rule, what).Inc()
	}
}

// exchange holds the series of a policy's rules, and lets go of another's.
func (m *ruleMetrics) exchange(hold, release iter.Seq[ruleSeries]) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held == nil {
		m.held = map[ruleSeries]int{}
	}
	for s := range hold {
		m.held[s]++
	}
	for s := range release {
		if m.held[s]--; m.held[s] == 0 {
			delete(m.held, s)
			m.counts.DeletePartialMatch(prometheus.Labels{
				"namespace": s.namespace, "workload": s.workload, "shard": s.shard, m.source: s.source, "rule": s.rule,
			})
		}
	}
}
