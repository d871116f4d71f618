package stages

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// maxPlans bounds the plans that a policy caches. Paths can name any resource; above the
// bound, plans are made for each request.
const maxPlans = 1024

// plans are the stages of a policy.
type plans struct {
	Gate   pipeline.Stages // of every request, before its plan is known
	Cached sync.Map        // match.Kind -> *pipeline.Plan
	count  atomic.Int32
}

// Plan returns the stages for a request, whose Info is set.
func (p *Policy) Plan(r *pipeline.Request) *pipeline.Plan {
	key := r.Kind()
	if known, ok := p.Plans.Cached.Load(key); ok {
		return known.(*pipeline.Plan)
	}
	key = key.Clone()
	made := p.make(key)
	if p.Plans.count.Load() < maxPlans && match.Storable(key.Verb, key.Subresource, key.Group, key.Resource) {
		if _, loaded := p.Plans.Cached.LoadOrStore(key, made); !loaded {
			p.Plans.count.Add(1)
		}
	}
	return made
}

// constructor returns a stage of a policy for requests of a kind, nil if it has nothing to do. The
// compiler accepts no function that returns a pointer, whose nil would be a stage.
type constructor func(*Policy, match.Kind) pipeline.Stage

var (
	// gateStages decide who may send requests, and how they are understood.
	gateStages = []constructor{newCertificateStage, newContradictionStage, newClassifyStage, newTokenStage}

	// firstStages begin every plan.
	firstStages = []constructor{newUpgradeStage, newChargeStage, newForwardedHeaderStage}

	// memberClusterStages restrict requests into member clusters which belong to one shard each.
	memberClusterStages = []constructor{newMemberClusterStage, newRootCAStage, newCatchUpStage, newRelistStage}

	// shardingStages restrict requests for resources to the objects of the shard.
	shardingStages = []constructor{
		inDryRun(newDryLockStage), inDryRun(newDryDeniedStage),
		newLockStage, newDeniedStage, newElectionStage,
		inDryRun(newDryExemptStage), inDryRun(newDryNarrowStage), inDryRun(newDryFenceStage), inDryRun(newDryClusterScopedStage),
		newRootCAStage, newExemptStage, newScopeStage,
		newStandbyStage, newFenceStage, newClusterScopedStage, newCatchUpStage,
		newSweepStage, newNarrowStage, newRelistStage,
	}

	// lastStages end every plan.
	lastStages = []constructor{
		newObserveStage, newShadowStage, newAuditStage, newRechargeStage, newStaleness,
		newLimitStage, newFaultStage, newUserAgentStage, newConnectStage,
	}
)

// stages returns those that have something to do.
func (p *Policy) stages(key match.Kind, lists ...[]constructor) (out pipeline.Stages) {
	for _, construct := range slices.Concat(lists...) {
		if s := construct(p, key); s != nil {
			out = append(out, s)
		}
	}
	return out
}

// make returns the plan for requests of a kind.
func (p *Policy) make(key match.Kind) *pipeline.Plan {
	out := &pipeline.Plan{Key: key, Delivery: pipeline.DeliveryOf(key), Urgent: urgent(p, key)}
	label := ""
	if isResource(key) {
		label, out.Activity = p.Tally.Metrics.Resource(key.Resource), newActivity(p, key)
	}
	out.Meters = p.env.Metrics.Meters(p.Tally.Metrics, key.Verb, label)
	var restrict []constructor
	switch {
	case key.MemberCluster && !p.asked().DividesMemberClusters():
		restrict = memberClusterStages
	case isResource(key):
		restrict = shardingStages
	}
	out.Stages = p.stages(key, firstStages, restrict, lastStages)
	return out
}

// isResource reports whether requests of a kind are for a resource, and not for another path.
func isResource(key match.Kind) bool { return key.Resource != "" }
