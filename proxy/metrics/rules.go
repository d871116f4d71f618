package metrics

import (
	"iter"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Counters caches the counters of one vector that differ in one label, so that counting
// takes no lock that pods share.
type Counters[K comparable] struct {
	known sync.Map // K -> prometheus.Counter
}

// Of returns the counter of a label, and finds it once; nil if find returns nil.
func (c *Counters[K]) Of(label K, find func(K) prometheus.Counter) prometheus.Counter {
	if known, ok := c.known.Load(label); ok {
		return known.(prometheus.Counter)
	}
	counter := find(label)
	if counter != nil {
		c.known.Store(label, counter)
	}
	return counter
}

// Rules counts what rules do to requests. The series of a rule are deleted with the last
// pod that has it.
type Rules struct {
	counts *prometheus.CounterVec // the last label is the action

	mu   sync.Mutex // taken on policy changes, and for the first use of a series
	used map[Rule]*ruleCounts
}

// Rule identifies the series of one rule. Source is the object that has it.
type Rule struct{ Namespace, Workload, Shard, Source, Name string }

// ruleCounts has the counters of one rule.
type ruleCounts struct {
	of      *Rules
	rule    Rule
	pods    int      // whose policy has the rule; 0: its series are deleted; of.mu
	actions []string // that have a series; of.mu
	by      Counters[string]
}

// count counts an action, unless the rule was deleted.
func (c *ruleCounts) count(what string) {
	if c == nil {
		return
	}
	if counter := c.by.Of(what, c.find); counter != nil {
		counter.Inc()
	}
}

func (c *ruleCounts) find(what string) prometheus.Counter {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if c.pods == 0 {
		return nil
	}
	if !slices.Contains(c.actions, what) {
		c.actions = append(c.actions, what)
	}
	s := c.rule
	return c.of.counts.WithLabelValues(s.Namespace, s.Workload, s.Shard, s.Source, s.Name, what)
}

// Tallies are the counts of a policy's rules.
type Tallies map[ruleName]*ruleCounts

type ruleName struct{ source, rule string }

// Count counts an action of a rule.
func (t Tallies) Count(source, rule, what string) { t[ruleName{source, rule}].count(what) }

// Acquire returns the counts of a policy's rules. They must be released.
func (m *Rules) Acquire(all iter.Seq[Rule]) Tallies {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := Tallies{}
	for s := range all {
		c := m.used[s]
		if c == nil {
			c = &ruleCounts{of: m, rule: s}
			m.used[s] = c
		}
		name := ruleName{s.Source, s.Name}
		if out[name] == nil { // two rules may have the name
			c.pods++
		}
		out[name] = c
	}
	return out
}

// Release is called when a policy is replaced.
func (m *Rules) Release(all Tallies) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range all {
		if c.pods--; c.pods == 0 {
			s := c.rule
			delete(m.used, s)
			for _, what := range c.actions { // a partial match would read all series
				m.counts.DeleteLabelValues(s.Namespace, s.Workload, s.Shard, s.Source, s.Name, what)
			}
		}
	}
}

// Breakers collects how many pods have an open breaker, by rule.
type Breakers func() map[Rule]int

var breakersOpen = prometheus.NewDesc("ctrlmesh_circuitbreaker_rule_open_pods",
	"Pods of this node in which the breaker of a rule is not closed.",
	append(workloadLabels[:3:3], "circuitbreaker", "rule"), nil)

// Describe implements prometheus.Collector.
func (Breakers) Describe(to chan<- *prometheus.Desc) { to <- breakersOpen }

// Collect implements prometheus.Collector.
func (b Breakers) Collect(to chan<- prometheus.Metric) {
	for r, n := range b() {
		to <- prometheus.MustNewConstMetric(breakersOpen, prometheus.GaugeValue, float64(n), r.Namespace, r.Workload, r.Shard, r.Source, r.Name)
	}
}
