package proxy

import (
	"errors"
	"strings"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/narrow"
)

// policy is a compiled PodPolicy. It is immutable but for what it remembers and counts.
type policy struct {
	pod                      *Pod
	message                  *meshv1.PodPolicy // that it was compiled from
	version, workload, shard string
	refuse                   string
	anyToken, passthrough    bool
	requestTimeout           time.Duration // the apiserver's; 0: not known
	division
	traffic
	would *policy // not nil: a dry run of this one, which holds nothing else
	tally
	succession
	plans
}

// division is what a policy says of the shard.
type division struct {
	limits     narrow.Limits
	locks      locks
	standby    bool
	key        meshv1.Key
	method     meshv1.Method
	fence      fence
	keepCaches bool
	ownership  ownership
}

// tally is what is counted under a policy.
type tally struct {
	metrics           *metrics.Workload
	limited, injected metrics.Tallies // of the rules
}

// succession is how a policy takes the place of another.
type succession struct {
	replaced chan struct{} // closed when another policy is in force
	writes   writes
	settled  chan struct{} // closed when all that earlier policies let through is over
}

func compile(p *Pod, m *meshv1.PodPolicy) (*policy, error) {
	out := &policy{
		pod:      p,
		message:  m,
		version:  m.GetVersion(),
		workload: m.GetWorkload(),
		shard:    m.GetSharding().GetShard(),
		refuse:   m.GetRefuse(),

		anyToken:    m.GetAnyToken(),
		passthrough: m.GetPassthrough(),

		requestTimeout: requestTimeout(m),

		division:   division{keepCaches: m.GetSharding().GetKeepCaches()},
		succession: succession{settled: make(chan struct{}), replaced: make(chan struct{})},
	}
	out.writes.n.Store(2)
	if err := out.divide(m.GetSharding()); err != nil {
		return nil, err
	}
	out.traffic = trafficOf(p, m) // who may not write what does not wait for rules
	out.gate = out.identify()
	if out.passthrough && (m.GetSharding() != nil || out.refuse != "") {
		return nil, errors.New("passthrough of a pod that is sharded or refused")
	}
	return out, nil
}

// divide compiles what a policy says of the shard.
func (p *policy) divide(s *meshv1.Sharding) (err error) {
	if s.GetDryRun() {
		if s.GetStandby() { // it would write
			return errors.New("a dry run of a pod in standby")
		}
		real := enforced(s)
		p.would = &policy{pod: p.pod, message: &meshv1.PodPolicy{Sharding: real}, shard: p.shard}
		return p.would.divide(real)
	}
	p.key, p.method, p.standby = s.GetKey(), s.GetMethod(), s.GetStandby()
	if p.limits, err = narrow.Compile(s.GetLimits()); err != nil {
		return err
	}
	if p.standby {
		p.limits = p.limits.Emptied()
	}
	p.fence = fenceOf(p, s)
	p.locks, err = locksOf(s)
	return err
}

// affects reports whether clients see another set of objects of a resource under
// next than under p, or must be rid now of what they might keep under p.
func (p *policy) affects(next *policy, res groupResource) bool {
	before, filtered := p.filters(res)
	after, filters := next.filters(res)
	_, divided := p.limits.Scope(res.group, res.resource)
	selector := p.limits.For(res.group, res.resource)
	return p.refuse != next.refuse ||
		selector.String() != next.limits.For(res.group, res.resource).String() ||
		filtered != filters || filtered && (p.key != next.key || !before.Equal(after)) ||
		divided && p.keepCaches && !next.keepCaches ||
		(divided || selector != nil) && !p.exemptsAs(next) ||
		lock.Kind(res.group, res.resource) && !p.locks.equal(next.locks)
}

type groupResource struct{ group, resource string }

// String is plural.group, as users write it.
func (r groupResource) String() string { return strings.TrimSuffix(r.resource+"."+r.group, ".") }

// acquire acquires the series that the policy counts in, before it is in force. The caller
// of acquire and release must hold the ledger's lock.
func (p *policy) acquire() {
	p.metrics = p.pod.unassigned
	if !p.pod.removed {
		m := p.pod.server.metrics
		p.metrics = m.Workloads.Acquire(p.pod.info.Namespace, p.workload, p.shard)
		p.limited = m.Limits.Acquire(func(yield func(metrics.Rule) bool) {
			for _, n := range p.rules.Names() {
				if !yield(p.series(n.Breaker, n.Rule)) {
					return
				}
			}
		})
		p.injected = m.Faults.Acquire(func(yield func(metrics.Rule) bool) {
			for n := range p.faults.Names() {
				if !yield(p.series(n.Injection, n.Rule)) {
					return
				}
			}
		})
	}
	if p.would != nil {
		p.would.metrics = p.metrics
	}
}

func (p *policy) series(source, rule string) metrics.Rule {
	return metrics.Rule{Namespace: p.pod.info.Namespace, Workload: p.workload, Shard: p.shard, Source: source, Name: rule}
}

// release releases the series of a policy that was replaced; p may be nil.
func (p *policy) release() {
	if p == nil || p.pod.removed {
		return
	}
	m := p.pod.server.metrics
	m.Limits.Release(p.limited)
	m.Faults.Release(p.injected)
	m.Workloads.Release(p.metrics)
}
