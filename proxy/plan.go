package proxy

import (
	"sync"
	"sync/atomic"

	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// maxPlans bounds the plans that a policy caches. Paths can name any resource; above the
// bound, plans are made for each request.
const maxPlans = 1024

// plans are the stages of a policy.
type plans struct {
	gate  stages   // of every request, before its plan is known
	known sync.Map // match.Kind -> *plan
	count atomic.Int32
}

func (p *policy) plan(info *apirequest.RequestInfo) *plan {
	key := match.Kind{Verb: info.Verb, Group: info.APIGroup, Resource: info.Resource, Subresource: info.Subresource}
	if known, ok := p.known.Load(key); ok {
		return known.(*plan)
	}
	key = key.Clone()
	made := p.make(key, info.IsResourceRequest)
	if p.count.Load() < maxPlans && match.Storable(key.Verb, key.Subresource, key.Group, key.Resource) {
		if _, loaded := p.known.LoadOrStore(key, made); !loaded {
			p.count.Add(1)
		}
	}
	return made
}

// identify returns the stages that decide by the caller alone.
func (p *policy) identify() stages {
	var out stages
	out.add(certificateStage{p.passthrough, p.env.notify})
	if p.refuse != "" {
		out.add(contradictionStage{p.refuse})
	}
	out.add(classifyStage{})
	out.add(newTokenStage(p))
	return out
}

func (p *policy) make(key match.Kind, isResource bool) *plan {
	out := &plan{
		key:   key,
		route: routeOf(key),
	}
	label := ""
	if isResource {
		label = p.metrics.Resource(key.Resource)
	}
	out.meters = p.env.metrics.Meters(p.metrics, key.Verb, label)
	var locks *lockStage
	var stale *staleness
	if isResource {
		locks, stale = newLockStage(p, key), newStaleness(p, key)
	}
	if locks != nil {
		out.urgent = locks.urgent
	}
	out.stages.add(upgradeStage{upgrades(key)}, admissionStage{out.route, out.urgent}, forwardedHeaderStage{})
	if isResource {
		out.stages.add(p.shardingStages(key, locks)...)
	}
	out.stages.add(auditStage{})
	if locks != nil {
		out.stages.add(readmissionStage{})
	}
	if stale != nil {
		out.stages.add(stale)
	}
	out.stages.add(newLimitStage(p, key, isResource), newFaultStage(p, key, isResource, stale))
	if key.Connects() {
		out.stages.add(connectStage{p, p.env.enter})
	}
	return out
}

// shardingStages returns the stages that restrict a request to the shard's objects.
func (p *policy) shardingStages(key match.Kind, locks *lockStage) (out stages) {
	if p.would != nil {
		out = p.dryRunStages(key)
	}
	if locks != nil {
		out.add(locks)
	}
	if p.would == nil {
		out.add(newElectionStage(p, key))
	}
	out.add(newRootCAStage(p, key))
	if e := p.Exemption(key); e != nil {
		out.add(exemptStage{e})
	}
	out.add(newScopeStage(p, key))
	if w := p.Waiting(key); w != nil {
		out.add(standbyStage{w, p})
	} else if s := newFenceStage(p, key); s != nil {
		out.add(s)
	}
	switch key.Verb {
	case "deletecollection":
		if b, ok := p.Sweep(key); ok {
			out.add(sweepStage{b})
		}
	case "list", "watch":
		watch := key.Verb == "watch"
		if s := newNarrowStage(p, key.GroupResource(), watch); s != nil {
			out.add(s)
		} else if p.Selector(key.GroupResource()) != nil {
			p.env.methods.Note(key.GroupResource(), isolation.ByLabels)
		}
		out.add(&relistStage{policy: p, resource: key.GroupResource(), watch: watch})
	}
	return out
}
