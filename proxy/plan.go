package proxy

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
)

// maxPlans bounds the plans a policy remembers. Paths can name any resource;
// beyond the bound plans are made for each request.
const maxPlans = 1024

// plans are the stages that a policy has requests pass.
type plans struct {
	gate  stages   // of every request, before its plan is known
	known sync.Map // planKey -> *plan
	count atomic.Int32
}

type planKey struct {
	verb, subresource string
	groupResource
}

func (k planKey) kind() match.Kind {
	return match.Kind{Verb: k.verb, Group: k.group, Resource: k.resource, Subresource: k.subresource}
}

// clone keeps a key from holding the path that it was cut from.
func (k planKey) clone() planKey {
	return planKey{
		strings.Clone(k.verb), strings.Clone(k.subresource),
		groupResource{strings.Clone(k.group), strings.Clone(k.resource)},
	}
}

// memorable reports whether parts of a path are short enough to be remembered:
// nothing that exists has a longer name.
func memorable(names ...string) bool {
	return !slices.ContainsFunc(names, func(s string) bool { return len(s) > 253 })
}

// plan is what a policy does about one verb of one resource.
type plan struct {
	key planKey
	// stages edit the request in turn. The first that refuses it ends it.
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

// route is the way upstream.
type route int

const (
	// short: the answer ends soon; the line is logged then.
	short route = iota
	// stream: the answer may go on for hours; it is flushed with every read, and
	// the line is logged when it starts.
	stream
)

func (p *policy) plan(info *apirequest.RequestInfo) *plan {
	key := planKey{info.Verb, info.Subresource, groupResource{info.APIGroup, info.Resource}}
	if known, ok := p.known.Load(key); ok {
		return known.(*plan)
	}
	key = key.clone()
	made := p.make(key, info.IsResourceRequest)
	if p.count.Load() < maxPlans && memorable(key.verb, key.subresource, key.group, key.resource) {
		if _, loaded := p.known.LoadOrStore(key, made); !loaded {
			p.count.Add(1)
		}
	}
	return made
}

// identify returns the stages that decide who may ask at all, before it matters what is
// asked.
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

func (p *policy) make(key planKey, isResource bool) *plan {
	out := &plan{
		key:   key,
		route: routeOf(key),
	}
	label := ""
	if isResource {
		label = p.metrics.Resource(key.resource)
	}
	out.meters = p.pod.server.metrics.Meters(p.metrics, key.verb, label)
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
	if key.connects() {
		out.stages.add(connectStage{})
	}
	return out
}

// shardingStages returns the stages that hold a request for a resource to the shard.
func (p *policy) shardingStages(key planKey, locks *lockStage) (out stages) {
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
	if s := p.exemptStage(key); s != nil {
		out.add(s)
	}
	if s := p.scopeStage(key); s != nil {
		out.add(s)
	}
	if s := p.standbyStage(key); s != nil {
		out.add(s)
	} else if s := p.fenceStage(key); s != nil {
		out.add(s)
	}
	switch key.verb {
	case "deletecollection":
		if b, ok := p.border(key); ok && p.key != meshv1.Key_KEY_OBJECT {
			out.add(sweepStage{b})
		}
	case "list", "watch":
		watch := key.verb == "watch"
		if s := p.narrowing(key.groupResource, watch); s != nil {
			out.add(s)
		} else if p.limits.For(key.group, key.resource) != nil {
			p.pod.methods.note(key.groupResource, byLabels)
		}
		out.add(&relistStage{resource: key.groupResource, watch: watch})
	}
	return out
}

func routeOf(key planKey) route {
	switch {
	case key.verb == "watch", key.verb == "proxy",
		key.group == "" && key.subresource == "proxy", // of other groups it may be anything
		key.group == "" && key.resource == "pods" && key.subresource == "log":
		return stream
	}
	return short
}

// upgrades is the list of subresources that speak SPDY or websocket.
func upgrades(key planKey) bool {
	if key.group != "" {
		return false
	}
	switch key.resource + "/" + key.subresource {
	case "pods/exec", "pods/attach", "pods/portforward",
		"pods/proxy", "services/proxy", "nodes/proxy":
		return true
	}
	return false
}
