package proxy

import (
	"iter"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// counters are series that differ in one label, found once each: a vector is all pods'.
type counters[K comparable] struct {
	known atomic.Pointer[map[K]prometheus.Counter] // immutable: there are few
}

// of is the counter of a label; nil if find has none.
func (c *counters[K]) of(label K, find func(K) prometheus.Counter) prometheus.Counter {
	known := c.known.Load()
	if known != nil {
		if counter, ok := (*known)[label]; ok {
			return counter
		}
	}
	counter := find(label)
	for counter != nil {
		next := map[K]prometheus.Counter{}
		if known != nil {
			next = maps.Clone(*known)
		}
		if next[label] = counter; c.known.CompareAndSwap(known, &next) {
			break
		}
		known = c.known.Load()
	}
	return counter
}

// ruleMetrics counts what rules do to requests. Rules come and go, and so do their
// series.
type ruleMetrics struct {
	counts *prometheus.CounterVec // the last label says what was done

	mu   sync.Mutex // of what changes with policies; requests take it for a series' first time
	held map[ruleSeries]*ruleCounts
}

// ruleSeries are those of one rule. source is whatever has it.
type ruleSeries struct{ namespace, workload, shard, source, rule string }

func (p *policy) series(source, rule string) ruleSeries {
	return ruleSeries{p.pod.info.Namespace, p.workload, p.shard, source, rule}
}

// ruleCounts are what one rule did.
type ruleCounts struct {
	of     *ruleMetrics
	series ruleSeries
	pods   int      // whose policy has the rule; 0: it is gone, and so are its series. of.mu
	told   []string // what of it there are series of. of.mu
	by     counters[string]
}

// count counts what the rule did. Once it is gone that shows nowhere.
func (c *ruleCounts) count(what string) {
	if c == nil {
		return
	}
	if counter := c.by.of(what, c.find); counter != nil {
		counter.Inc()
	}
}

func (c *ruleCounts) find(what string) prometheus.Counter {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if c.pods == 0 {
		return nil
	}
	if !slices.Contains(c.told, what) {
		c.told = append(c.told, what)
	}
	s := c.series
	return c.of.counts.WithLabelValues(s.namespace, s.workload, s.shard, s.source, s.rule, what)
}

// tallies are the counts of a policy's rules.
type tallies map[ruleName]*ruleCounts

type ruleName struct{ source, rule string }

func (t tallies) count(source, rule, what string) { t[ruleName{source, rule}].count(what) }

// hold is for a policy that comes to be in force.
func (m *ruleMetrics) hold(all iter.Seq[ruleSeries]) tallies {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held == nil {
		m.held = map[ruleSeries]*ruleCounts{}
	}
	out := tallies{}
	for s := range all {
		c := m.held[s]
		if c == nil {
			c = &ruleCounts{of: m, series: s}
			m.held[s] = c
		}
		name := ruleName{s.source, s.rule}
		if out[name] == nil { // else two have the name
			c.pods++
		}
		out[name] = c
	}
	return out
}

// release is for a policy that is in force no more.
func (m *ruleMetrics) release(all tallies) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range all {
		if c.pods--; c.pods == 0 {
			s := c.series
			delete(m.held, s)
			for _, what := range c.told { // a partial match would look at all series there are
				m.counts.DeleteLabelValues(s.namespace, s.workload, s.shard, s.source, s.rule, what)
			}
		}
	}
}

// hold has what is done under the policy counted, before it is in force. With release
// it is called under the ledger's lock.
func (p *policy) hold() {
	if p.pod.removed {
		p.countFor(p.pod.nobody)
		return
	}
	m := p.pod.server.metrics
	p.countFor(m.owners.hold(p.pod.info.Namespace, p.workload, p.shard))
	p.limited = m.limits.hold(func(yield func(ruleSeries) bool) {
		for _, n := range p.rules.Names() {
			if !yield(p.series(n.Breaker, n.Rule)) {
				return
			}
		}
	})
	p.injected = m.faults.hold(func(yield func(ruleSeries) bool) {
		for n := range p.faults.Names() {
			if !yield(p.series(n.Injection, n.Rule)) {
				return
			}
		}
	})
}

// countFor has the policy's series be those of an owner.
func (p *policy) countFor(o *owner) {
	p.owner = o
	if p.would != nil {
		p.would.owner = o
	}
}

// release is for a policy that is in force no more; nil is none.
func (p *policy) release() {
	if p == nil || p.pod.removed {
		return
	}
	m := p.pod.server.metrics
	m.limits.release(p.limited)
	m.faults.release(p.injected)
	m.owners.release(p.owner)
}
