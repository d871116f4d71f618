package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// PodInfo describes a pod before its first policy.
type PodInfo struct {
	UID, Namespace, Name string
	// RequireToken refuses requests without a token that is bound to this pod, under any
	// policy: otherwise only the address identifies the pod.
	RequireToken bool
	// Traffic has the rules that an earlier proxy of this pod had in force last; nil: unknown.
	Traffic *meshv1.Traffic
	// Journal records writes in flight for a later proxy; nil: none.
	Journal writes.Journal
}

// env is what the stages of a pod's policies share.
type env struct {
	info PodInfo
	id   string // namespace/name
	known
	rules
	policy   atomic.Pointer[policy] // in force
	draining context.Context        // ends when the pod accepts no more
	ledger   *relist.Ledger
	metrics  *metrics.Node
	// unassigned has the series of the pod before its first policy.
	unassigned *metrics.Workload
	removed    bool // nothing is counted any more
	leaf       func() (*tls.Certificate, error)
	// notify reports to the users of the pod: one of the Reasons and a message.
	notify func(reason, format string, args ...any)
	// get sends a request of the proxy's own, with the caller's credentials.
	get func(context.Context, *upstream.Request) (upstream.Response, error)
	// noResponse logs that the apiserver did not answer, and returns the refusal instead.
	noResponse func(error) *apierrors.StatusError
	// enter adds a request to the open connections into pods and services. It returns false
	// if the policy is not in force any more.
	enter func(*pipeline.State, *policy) bool
}

// known is what the pod's requests have shown.
type known struct {
	methods    isolation.Methods
	lockWrites *lock.Writes
	observed   lock.Observations
	tokens     tokens
}

// rules has what a pod's rules have counted.
type rules struct {
	limits    *limit.Store
	faults    *fault.Store
	histories relist.Histories
}

// lift takes out of a request's faults what is not in effect any more, under the policy in
// force, which it returns.
func (e *env) lift(f *fault.Faults) *policy {
	pol := e.policy.Load()
	pol.faults.Lift(time.Now(), f)
	return pol
}

// wait waits for a fault, as long as it is in effect. It reports false if the time did not
// pass: the client or the answer is gone, or another proxy takes over.
func (e *env) wait(x *pipeline.State, left func() time.Duration) bool {
	ctx, cancel := context.WithCancel(x.Ctx)
	defer cancel()
	defer context.AfterFunc(x.Req.Ctx, cancel)()
	return fault.Wait(ctx, e.draining.Done(), func() <-chan struct{} { return e.lift(x.Faults).replaced }, left)
}

// identifiesAs reports whether a holder's identity is the pod's, as client-go and
// controller-runtime form it: the host name, alone or before an underscore.
func (e *env) identifiesAs(holder string) bool {
	host, _, _ := strings.Cut(holder, "_")
	return host == e.info.Name
}

// policy is a compiled PodPolicy. It is immutable, except for its caches and counts.
type policy struct {
	env             *env
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

func compile(e *env, m *meshv1.PodPolicy) (*policy, error) {
	out := &policy{
		env: e, message: m,
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
	out.traffic = trafficOf(e, m) // never fails: isolation must not wait for valid rules
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
		p.would = &policy{env: p.env, message: &meshv1.PodPolicy{Sharding: real}, shard: p.shard}
		p.Division, _ = isolation.Compile(&meshv1.Sharding{KeepCaches: s.GetKeepCaches()}, "")
		return p.would.divide(real)
	}
	if p.Division, err = isolation.Compile(s, p.env.info.Namespace); err != nil {
		return err
	}
	p.locks, err = lock.NewSet(s)
	return err
}

// evaluate applies the stages to a request, as it came.
func (p *policy) evaluate(x *pipeline.State) *pipeline.Outcome {
	x.Renew()
	if end := p.gate.Apply(x); end != nil {
		return end
	}
	x.Plan = p.plan(x.Req.Info)
	return x.Plan.Stages.Apply(x)
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
// of acquire and release must serialize the changes of a policy.
func (p *policy) acquire() {
	p.metrics = p.env.unassigned
	if !p.env.removed {
		m := p.env.metrics
		p.metrics = m.Workloads.Acquire(p.env.info.Namespace, p.workload, p.shard)
		p.limited = m.Limits.Acquire(func(yield func(metrics.Rule) bool) {
			for _, n := range p.traffic.rules.Names() {
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
	return metrics.Rule{Namespace: p.env.info.Namespace, Workload: p.workload, Shard: p.shard, Source: source, Name: rule}
}

// release releases the series of a policy that was replaced; p may be nil.
func (p *policy) release() {
	if p == nil || p.env.removed {
		return
	}
	m := p.env.metrics
	m.Limits.Release(p.limited)
	m.Faults.Release(p.injected)
	m.Workloads.Release(p.metrics)
}

// inherit keeps what a policy without sharding does not change.
func (p *policy) inherit(old *policy) {
	if p.requestTimeout == 0 && old != nil {
		p.requestTimeout = old.requestTimeout
	}
}
