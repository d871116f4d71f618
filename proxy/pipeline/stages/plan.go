package stages

import (
	"sync"
	"sync/atomic"

	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
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
	if known, ok := p.Cached.Load(key); ok {
		return known.(*pipeline.Plan)
	}
	key = key.Clone()
	made := p.make(key, r.Info.IsResourceRequest)
	if p.count.Load() < maxPlans && match.Storable(key.Verb, key.Subresource, key.Group, key.Resource) {
		if _, loaded := p.Cached.LoadOrStore(key, made); !loaded {
			p.count.Add(1)
		}
	}
	return made
}

// gate returns the stages that decide who may send requests, and how they are understood.
func (p *Policy) gate() pipeline.Stages {
	var out pipeline.Stages
	out.Add(certificateStage{p.Passthrough, p.env.Notify})
	if p.Refuse != "" {
		out.Add(contradictionStage{p.Refuse})
	}
	out.Add(classifyStage{p.clusters})
	out.Add(newTokenStage(p))
	return out
}

func (p *Policy) make(key match.Kind, isResource bool) *pipeline.Plan {
	out := &pipeline.Plan{Key: key, Route: pipeline.RouteOf(key)}
	label := ""
	if isResource {
		label = p.Metrics.Resource(key.Resource)
	}
	out.Meters = p.env.Metrics.Meters(p.Metrics, key.Verb, label)
	var locks *lockStage
	var stale *staleness
	if isResource {
		out.Activity, locks, stale = newActivity(p, key), newLockStage(p, key), newStaleness(p, key)
	}
	if locks != nil {
		out.Urgent = locks.urgent
	}
	out.Stages.Add(upgradeStage{pipeline.Upgrades(key)}, admissionStage{out.Route, out.Urgent}, forwardedHeaderStage{})
	switch {
	case key.Member && !p.asked().DividesMembers():
		out.Stages.Add(p.memberStages(key, isResource)...)
	case isResource:
		out.Stages.Add(p.shardingStages(key, locks)...)
	}
	if isResource {
		out.Stages.Add(newObserveStage(p, key))
	}
	out.Stages.Add(newShadowStage(p, key, isResource))
	out.Stages.Add(auditStage{})
	if locks != nil {
		out.Stages.Add(readmissionStage{})
	}
	if stale != nil {
		out.Stages.Add(stale)
	}
	out.Stages.Add(newLimitStage(p, key, isResource), newFaultStage(p, key, isResource, stale))
	if s := newUserAgentStage(p); s != nil {
		out.Stages.Add(s)
	}
	if key.Connects() {
		out.Stages.Add(connectStage{p, p.env.Enter})
	}
	return out
}

// memberStages returns the stages that restrict requests into member clusters which belong to one
// shard each.
func (p *Policy) memberStages(key match.Kind, isResource bool) (out pipeline.Stages) {
	out.Add(newMemberStage(p, key))
	if !isResource {
		return out
	}
	out.Add(newRootCAStage(p, key), newCatchUpStage(p, key))
	if key.Verb == "list" || key.Verb == "watch" {
		out.Add(newRelistStage(p, key))
	}
	return out
}

// shardingStages returns the stages that restrict a request to the shard's objects.
func (p *Policy) shardingStages(key match.Kind, locks *lockStage) (out pipeline.Stages) {
	if p.Would != nil {
		out = p.dryRunStages(key)
	}
	if locks != nil {
		out.Add(locks)
	}
	if s := newDeniedStage(p, key); s != nil && p.Would == nil {
		out.Add(s)
	}
	if p.Would == nil {
		out.Add(newElectionStage(p, key))
	}
	out.Add(newRootCAStage(p, key))
	if e := p.Exemption(key); e != nil {
		out.Add(exemptStage{e})
	}
	out.Add(newScopeStage(p, key))
	if w := p.Waiting(key); w != nil {
		out.Add(standbyStage{w, p})
	} else if s := newFenceStage(p, key); s != nil {
		out.Add(s)
	}
	if s := newClusterScopedStage(p, key); s != nil {
		out.Add(s)
	}
	out.Add(newCatchUpStage(p, key))
	switch key.Verb {
	case "deletecollection":
		if b, ok := p.Sweep(key); ok {
			out.Add(sweepStage{b})
		}
	case "list", "watch":
		watch := key.Verb == "watch"
		if s := newNarrowStage(p, key.GroupResource(), watch); s != nil {
			out.Add(s)
		} else if p.Selector(key.GroupResource()) != nil {
			p.env.Methods.Note(key.GroupResource(), isolation.ByLabels)
		}
		out.Add(newRelistStage(p, key))
	}
	return out
}
