package proxy

import (
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// policy is a compiled PodPolicy. It is immutable, except for its caches and counts.
type policy struct {
	pod             *Pod
	message         *meshv1.PodPolicy // that it was compiled from
	workload, shard string
	refuse          string
	passthrough     bool
	requestTimeout  time.Duration // the apiserver's; 0: not known
	*isolation.Division
	locks lock.Set
	traffic
	would *policy // not nil: the policy without the dry run; only its division is set
	tally
	succession
	plans
}

// tally has the series that count under a policy.
type tally struct {
	metrics           *metrics.Workload
	limited, injected metrics.Tallies // of the rules
}

// succession is how a policy replaces another.
type succession struct {
	replaced chan struct{} // closed when another policy is in force
	writes   writes.Count
	settled  chan struct{} // closed when no write under earlier policies can take effect
}

func compile(p *Pod, m *meshv1.PodPolicy) (*policy, error) {
	out := &policy{
		pod: p, message: m,
		workload: m.GetWorkload(), shard: m.GetSharding().GetShard(),
		refuse: m.GetRefuse(), passthrough: m.GetPassthrough(),
		requestTimeout: writes.RequestTimeout(m),
		succession:     succession{settled: make(chan struct{}), replaced: make(chan struct{})},
	}
	// One while the policy is in force, and one while writes of earlier ones are in flight.
	out.writes.Raise()
	out.writes.Raise()
	if err := out.divide(m.GetSharding()); err != nil {
		return nil, err
	}
	out.traffic = trafficOf(p, m) // never fails: isolation must not wait for valid rules
	out.gate = out.identify()
	if out.passthrough && (m.GetSharding() != nil || out.refuse != "") {
		return nil, errors.New("invalid passthrough: the pod is sharded or refused")
	}
	return out, nil
}

// divide compiles the sharding of a policy.
func (p *policy) divide(s *meshv1.Sharding) (err error) {
	if s.GetDryRun() {
		if s.GetStandby() { // it would write
			return errors.New("invalid dry run: the pod is in standby")
		}
		real := enforced(s)
		p.would = &policy{pod: p.pod, message: &meshv1.PodPolicy{Sharding: real}, shard: p.shard}
		p.Division, _ = isolation.Compile(&meshv1.Sharding{KeepCaches: s.GetKeepCaches()}, "")
		return p.would.divide(real)
	}
	if p.Division, err = isolation.Compile(s, p.pod.info.Namespace); err != nil {
		return err
	}
	p.locks, err = lock.NewSet(s)
	return err
}

// Affects implements relist.Policy: it reports whether clients get other objects of a
// resource under next than under p, or must drop under next what they could keep under p.
func (p *policy) Affects(next relist.Policy, res schema.GroupResource) bool {
	n := next.(*policy)
	return p.refuse != n.refuse || p.Division.Affects(n.Division, res) ||
		lock.Kind(res.Group, res.Resource) && !p.locks.Equal(n.locks)
}

// KeepsCaches implements relist.Policy.
func (p *policy) KeepsCaches() bool { return p.KeepCaches }

// DropsEvents implements relist.Policy.
func (p *policy) DropsEvents(res schema.GroupResource) bool {
	return p.faults.Drops(match.Kind{Verb: "watch", Group: res.Group, Resource: res.Resource})
}

// acquire acquires the series that the policy counts in, before it is in force. The caller
// of acquire and release must hold Pod.changing.
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
