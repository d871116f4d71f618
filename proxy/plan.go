package proxy

import (
	"sync"
	"sync/atomic"

	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
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

// plan is how a policy handles one verb of one resource.
type plan struct {
	key match.Kind
	// stages edit the request in turn. The first that ends the request is the last.
	stages stages
	route  route
	locks  *lockStage // one of them, or nil
	meters *metrics.Meters
}

// stage is one decision about a request on its way up. It edits what goes upstream, or
// ends the request.
type stage interface {
	apply(*exchange) *outcome
}

// route is how a response is passed on.
type route int

const (
	// short: the response ends soon, and is logged then.
	short route = iota
	// stream: the response may last for hours. It is flushed after every read, and logged
	// when it begins.
	stream
)

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
	out.add(certificateStage{p.passthrough})
	if p.refuse != "" {
		out.add(contradictionStage{p.refuse})
	}
	out.add(classifyStage{})
	out.add(p.tokenStage())
	return out
}

// stages are applied in turn. The first that ends the request is the last.
type stages []stage

// add appends those that have something to do.
func (s *stages) add(all ...stage) {
	for _, one := range all {
		if one != nil {
			*s = append(*s, one)
		}
	}
}

func (s stages) apply(x *exchange) *outcome {
	for _, one := range s {
		if end := one.apply(x); end != nil {
			return end
		}
	}
	return nil
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
	out.meters = p.pod.server.metrics.Meters(p.metrics, key.Verb, label)
	var stale *staleness
	if isResource {
		out.locks, stale = p.lockStage(key), p.staleness(key)
	}
	out.stages.add(upgradeStage{upgrades(key)}, admissionStage{out.route, out.locks}, forwardedHeaderStage{})
	if isResource {
		out.stages.add(p.shardingStages(key, out.locks)...)
	}
	out.stages.add(auditStage{})
	if out.locks != nil {
		out.stages.add(readmissionStage{})
	}
	if stale != nil {
		out.stages.add(stale)
	}
	out.stages.add(p.limitStage(key, isResource), p.faultStage(key, isResource, stale))
	if key.Connects() {
		out.stages.add(connectStage{})
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
		out.add(p.electionStage(key))
	}
	out.add(p.rootCAStage(key))
	if e := p.Exemption(key); e != nil {
		out.add(exemptStage{e})
	}
	out.add(p.scopeStage(key))
	if w := p.Waiting(key); w != nil {
		out.add(standbyStage{w})
	} else if s := p.fenceStage(key); s != nil {
		out.add(s)
	}
	switch key.Verb {
	case "deletecollection":
		if b, ok := p.Sweep(key); ok {
			out.add(sweepStage{b})
		}
	case "list", "watch":
		watch := key.Verb == "watch"
		if s := p.narrowStage(key.GroupResource(), watch); s != nil {
			out.add(s)
		} else if p.Selector(key.GroupResource()) != nil {
			p.pod.methods.Note(key.GroupResource(), isolation.ByLabels)
		}
		out.add(&relistStage{resource: key.GroupResource(), watch: watch})
	}
	return out
}

func routeOf(key match.Kind) route {
	switch {
	case key.Verb == "watch", key.Verb == "proxy",
		key.Group == "" && key.Subresource == "proxy", // of other groups it may be anything
		key.Group == "" && key.Resource == "pods" && key.Subresource == "log":
		return stream
	}
	return short
}

// upgrades is the list of subresources that speak SPDY or websocket.
func upgrades(key match.Kind) bool {
	if key.Group != "" {
		return false
	}
	switch key.Resource + "/" + key.Subresource {
	case "pods/exec", "pods/attach", "pods/portforward",
		"pods/proxy", "services/proxy", "nodes/proxy":
		return true
	}
	return false
}
