// Package stages has the policy of a pod, compiled, and the stages that it consists of.
//
// [Compile] resolves what concerns every request, and [Policy.Plan] the stages of a verb and
// resource, once. A stage that has nothing to do is not in the plan. What stages share with
// the pod is in [Env]; they know no connection.
//
//	policy.go     Policy, Env
//	plan.go       the stages of a verb and resource, in order
//	activity.go   what the manager compares of the writes and watches of shards
//	caller.go     certificate, contradiction, classification, token
//	charge.go     upgrade, budgets, header fields, connections into pods
//	locks.go      names of the operator's locks
//	election.go   locks that the policy does not name; writes of the mesh's CA
//	denied.go     clients that find no objects
//	narrowing.go  lists and watches of the shard alone, by selectors and filters
//	fence.go      requests for objects of other shards; standby
//	cluster.go    writes of objects in no namespace
//	shadowing.go  dry runs of a shadow's writes
//	membercluster.go  requests into member clusters
//	relisting.go  watches whose clients must list first, and their writes meanwhile; lists
//	              that a fault makes stale
//	supplement.go what a watch begins with that resumes
//	observing.go  events of watches that pass unchanged
//	useragent.go  the User-Agent that the apiserver receives
//	traffic.go    rules in force, and limits
//	faulting.go   faults
//	dryrun.go     what a policy would do
package stages

import (
	"context"
	"crypto/tls"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/activity"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/shadow"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/usage"
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

// Env is what the stages of a pod's policies share.
type Env struct {
	Info         PodInfo
	ID           string // namespace/name
	Observations Observations
	Rules        Rules
	Policy       atomic.Pointer[Policy] // in force
	Draining     context.Context        // ends when the pod accepts no more
	Ledger       *relist.Ledger
	Metrics      *metrics.Node
	// Unassigned has the series of the pod before its first policy.
	Unassigned *metrics.Workload
	Removed    bool // nothing is counted any more
	Leaf       func() (*tls.Certificate, error)
	// Notify reports to the users of the pod: one of the Reasons and a message.
	Notify func(reason, format string, args ...any)
	// Get sends a request of the proxy's own, with the caller's credentials.
	Get func(context.Context, *upstream.Request) (upstream.Response, error)
	// NoResponse logs that the apiserver did not answer, and returns the refusal instead.
	NoResponse func(error) *apierrors.StatusError
	// Enter adds a request to the open connections into pods and services. It returns false
	// if the policy is not in force any more.
	Enter func(*pipeline.State, *Policy) bool
}

// Reasons that Notify is called with.
const (
	ReasonClientCertificate = "ClientCertificateRefused"
	ReasonToken             = "TokenRefused"
	ReasonBound             = "ProxyBoundReached"
	ReasonDistrust          = "MeshCANotTrusted"
)

// Observations are what the pod's requests have shown.
type Observations struct {
	Methods    isolation.Methods
	LockWrites *lock.Writes
	Observed   lock.Observations
	// Refusals are those of the apiserver for the locks of the policies.
	Refusals lock.Refusals
	Activity activity.Log
	Outcomes activity.Outcomes
	Shadow   shadow.Comparer
	// Usage is what the pod requests while its requests pass unchanged.
	Usage  usage.Log
	Tokens Tokens
}

// Rules has what a pod's rules have counted.
type Rules struct {
	Limits    *limit.Store
	Faults    *fault.Store
	Histories relist.Histories
}

// Lift takes out of a request's faults what is not in effect any more, under the policy in
// force, which it returns.
func (e *Env) Lift(f *fault.Faults) *Policy {
	pol := e.Policy.Load()
	pol.Traffic.faults.Lift(time.Now(), f)
	return pol
}

// Wait waits for a fault, as long as it is in effect. It reports false if the time did not
// pass: the client or the answer is gone, or another proxy takes over.
func (e *Env) Wait(x *pipeline.State, left func() time.Duration) bool {
	ctx, cancel := context.WithCancel(x.Ctx)
	defer cancel()
	defer context.AfterFunc(x.Req.Ctx, cancel)()
	return fault.Wait(ctx, e.Draining.Done(), func() <-chan struct{} { return e.Lift(x.Injection.Faults).Succession.Replaced }, left)
}

// identifiesAs reports whether a holder's identity is the pod's, as client-go and
// controller-runtime form it: the host name, alone or before an underscore.
func (e *Env) identifiesAs(holder string) bool {
	host, _, _ := strings.Cut(holder, "_")
	return host == e.Info.Name
}

// Policy is a compiled PodPolicy. It is immutable, except for its caches and counts.
type Policy struct {
	env             *Env
	Message         *meshv1.PodPolicy // that it was compiled from
	workload, Shard string
	Refuse          string
	Passthrough     bool
	RequestTimeout  time.Duration // the apiserver's; 0: not known
	Division        *isolation.Division
	Locks           lock.Set
	clusters        pipeline.ClusterPaths
	Traffic         traffic
	Would           *Policy // not nil: the policy without the dry run; only its division is set
	Tally           tally
	Succession      succession
	Plans           plans
}

// tally has the series that count under a policy.
type tally struct {
	Metrics           *metrics.Workload
	Limited, Injected metrics.Tallies // of the rules
}

// succession is how a policy replaces another.
type succession struct {
	Replaced chan struct{} // closed when another policy is in force
	Writes   writes.Count
	Settled  chan struct{} // closed when no write under earlier policies can take effect
}

// Compile compiles a policy of the pod of e.
func Compile(e *Env, m *meshv1.PodPolicy) (*Policy, error) {
	out := &Policy{
		env: e, Message: m,
		workload: m.GetWorkload(), Shard: m.GetSharding().GetShard(),
		Refuse: m.GetRefuse(), Passthrough: m.GetPassthrough(),
		RequestTimeout: writes.RequestTimeout(m),
		Succession:     succession{Settled: make(chan struct{}), Replaced: make(chan struct{})},
	}
	// One while the policy is in force, and one while writes of earlier ones are in flight.
	out.Succession.Writes.Raise()
	out.Succession.Writes.Raise()
	if err := out.divide(m.GetSharding()); err != nil {
		return nil, err
	}
	var err error
	if out.clusters, err = pipeline.NewClusterPaths(m.GetClusterPaths()); err != nil {
		return nil, err
	}
	out.Traffic = trafficOf(e, m) // never fails: isolation must not wait for valid rules
	out.Plans.Gate = out.stages(match.Kind{}, gateStages)
	if out.Passthrough && (m.GetSharding() != nil || out.Refuse != "") {
		return nil, errors.New("invalid passthrough: the pod is sharded or refused")
	}
	return out, nil
}

// divide compiles the sharding of a policy.
func (p *Policy) divide(s *meshv1.Sharding) (err error) {
	if s.GetDryRun() {
		if s.GetStandby() || s.GetShadow() != nil { // it would write
			return errors.New("invalid dry run: the pod is in standby, or a shadow")
		}
		real := enforced(s)
		p.Would = &Policy{env: p.env, Message: &meshv1.PodPolicy{Sharding: real}, Shard: p.Shard}
		p.Division, _ = isolation.Compile(&meshv1.Sharding{KeepCaches: s.GetKeepCaches()}, "")
		return p.Would.divide(real)
	}
	if p.Division, err = isolation.Compile(s, p.env.Info.Namespace); err != nil {
		return err
	}
	p.Locks, err = lock.NewSet(s)
	return err
}

// asked returns the division that would be in force without the dry run.
func (p *Policy) asked() *isolation.Division {
	if p.Would != nil {
		return p.Would.Division
	}
	return p.Division
}

// Evaluate applies the stages to a request, as it came.
func (p *Policy) Evaluate(x *pipeline.State) *pipeline.Outcome {
	x.Renew()
	if end := p.Plans.Gate.Apply(x); end != nil {
		return end
	}
	x.Plan = p.Plan(&x.Req)
	return x.Plan.Stages.Apply(x)
}

// Affects implements relist.Policy: it reports whether clients get other objects of a
// resource under next than under p, or must drop under next what they could keep under p.
func (p *Policy) Affects(next relist.Policy, res relist.Resource) bool {
	n := next.(*Policy)
	if !slices.Equal(p.clusters, n.clusters) {
		return true // a path may lead elsewhere
	}
	switch c := res.Cluster; {
	case c == "":
	case p.Division.DividesMemberClusters() != n.Division.DividesMemberClusters():
		return true
	case !p.Division.DividesMemberClusters():
		return p.Refuse != n.Refuse || p.Division.MemberClusters().Refuses(c) != n.Division.MemberClusters().Refuses(c)
	}
	return p.Refuse != n.Refuse || p.Division.Affects(n.Division, res.GroupResource) ||
		res.Cluster == "" && lock.Kind(res.Group, res.Resource) && !p.Locks.Equal(n.Locks)
}

// Redivides implements relist.Policy. It is true of all that Affects is true of.
func (p *Policy) Redivides(next relist.Policy) bool {
	n := next.(*Policy)
	return p.Refuse != n.Refuse || p.Division.Redivides(n.Division) || !p.Locks.Equal(n.Locks) || !slices.Equal(p.clusters, n.clusters)
}

// KeepsCaches implements relist.Policy.
func (p *Policy) KeepsCaches() bool { return p.Division.KeepCaches }

// PassesThrough implements relist.Policy.
func (p *Policy) PassesThrough() bool { return p.Passthrough }

// Observes reports whether the pod's requests pass unchanged, and are counted for its owner: the policy has
// no sharding, or a dry run.
func (p *Policy) Observes() bool {
	return p != nil && (p.Message.GetSharding() == nil || p.Would != nil)
}

// DropsEvents implements relist.Policy.
func (p *Policy) DropsEvents(res relist.Resource) bool {
	return p.Traffic.faults.Drops(match.Kind{Verb: "watch", Group: res.Group, Resource: res.Resource, MemberCluster: res.Cluster != ""})
}

// Acquire acquires the series that the policy counts in, before it is in force. The caller
// of Acquire and Release must serialize the changes of a policy.
func (p *Policy) Acquire() {
	p.Tally.Metrics = p.env.Unassigned
	if !p.env.Removed {
		m := p.env.Metrics
		p.Tally.Metrics = m.Workloads.Acquire(p.env.Info.Namespace, p.workload, p.Shard)
		p.Tally.Limited = m.Limits.Acquire(func(yield func(metrics.Rule) bool) {
			for _, n := range p.Traffic.Rules.Names() {
				if !yield(p.Series(n.Breaker, n.Rule)) {
					return
				}
			}
		})
		p.Tally.Injected = m.Faults.Acquire(func(yield func(metrics.Rule) bool) {
			for n := range p.Traffic.faults.Names() {
				if !yield(p.Series(n.Injection, n.Rule)) {
					return
				}
			}
		})
	}
	if p.Would != nil {
		p.Would.Tally.Metrics = p.Tally.Metrics
	}
}

// Series returns the labels of a rule of the policy.
func (p *Policy) Series(source, rule string) metrics.Rule {
	return metrics.Rule{Namespace: p.env.Info.Namespace, Workload: p.workload, Shard: p.Shard, Source: source, Name: rule}
}

// Release releases the series of a policy that was replaced; p may be nil.
func (p *Policy) Release() {
	if p == nil || p.env.Removed {
		return
	}
	m := p.env.Metrics
	m.Limits.Release(p.Tally.Limited)
	m.Faults.Release(p.Tally.Injected)
	m.Workloads.Release(p.Tally.Metrics)
}

// Inherit keeps what a policy without sharding does not change.
func (p *Policy) Inherit(old *Policy) {
	if p.RequestTimeout == 0 && old != nil {
		p.RequestTimeout = old.RequestTimeout
	}
}
