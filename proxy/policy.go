package proxy

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/narrow"
)

// maxPlans bounds the plans a policy remembers. Paths can name any resource;
// beyond the bound plans are made for each request.
const maxPlans = 1024

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
	owner           *owner
	limited, harmed tallies // of the rules
}

// succession is how a policy takes the place of another.
type succession struct {
	replaced chan struct{} // closed when another policy is in force
	writes   writes
	settled  chan struct{} // closed when all that earlier policies let through is over
}

// plans are the stages that a policy has requests pass.
type plans struct {
	gate  stages   // of every request, before its plan is known
	known sync.Map // planKey -> *plan
	count atomic.Int32
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

// affects tells whether clients see another set of objects of a resource under
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

// memorable tells whether parts of a path are short enough to be remembered:
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
	meters *meters
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
	if known, ok := p.plans.known.Load(key); ok {
		return known.(*plan)
	}
	key = key.clone()
	made := p.make(key, info.IsResourceRequest)
	if p.count.Load() < maxPlans && memorable(key.verb, key.subresource, key.group, key.resource) {
		if _, loaded := p.plans.known.LoadOrStore(key, made); !loaded {
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
		key:    key,
		route:  routeOf(key),
		meters: p.pod.server.metrics.of(p.owner, key.verb, p.owner.names.label(key.resource), isResource),
	}
	var stale *staleness
	if isResource {
		out.locks, stale = p.lockStage(key), p.staleness(key)
	}
	out.stages.add(upgradeStage{upgrades(key)}, admissionStage{out.route, out.locks}, forwardedHeaderStage{})
	if isResource {
		out.stages.add(p.shardingStages(key, out.locks)...)
	}
	out.stages.add(auditStage{p.pod.server})
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
