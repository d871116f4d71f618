package stages

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// Actions that a policy would take without the dry run, or without isolation Observe.
const (
	wouldNarrow = "narrowed"
	wouldRefuse = "refused"
	wouldRename = "renamed"

	observedForeign = "observed"
	observedUnknown = "unknown" // the owner of the object
)

// enforced returns a policy's sharding without the dry run.
func enforced(s *meshv1.Sharding) *meshv1.Sharding {
	s = proto.CloneOf(s)
	s.DryRun = false
	return s
}

// withheld is an action that a stage counts instead of taking it; empty: it is not counted.
type withheld string

// withheldAction returns an action that the policy withholds from requests with a verb. The
// series exists from then on.
func (p *Policy) withheldAction(verb, action string) withheld {
	p.withheldCount(verb, action)
	return withheld(action)
}

// note records the action. A refusal replaces a narrowing: the request would not be sent.
func (w withheld) note(x *pipeline.State) {
	if w != "" && (x.Would == "" || x.Would == wouldNarrow) {
		x.Would = string(w)
	}
}

// CountWithheld counts the action that a dry run or isolation Observe has kept from a request.
// Call it once per request, on the policy that evaluated it last: an evaluation that the
// request started over from does not count.
func (p *Policy) CountWithheld(x *pipeline.State) {
	if x.Would != "" {
		p.withheldCount(x.Req.Info.Verb, x.Would).Inc()
	}
}

func (p *Policy) withheldCount(verb, action string) prometheus.Counter {
	in := p.env.Metrics.Foreign
	if p.Would != nil {
		in = p.env.Metrics.DryRun
	}
	return p.Metrics.Action(in, verb, action)
}

// dryRunStages returns the stages of a dry run, which edit and refuse nothing.
func (p *Policy) dryRunStages(key match.Kind) (out pipeline.Stages) {
	would := p.Would
	if len(would.Locks) > 0 && mayLock(key) {
		out = append(out, &dryLockStage{would.Locks, p.withheldAction(key.Verb, wouldRename)})
	}
	if s := dryDeniedStage(p, would, key); s != nil {
		out.Add(s)
	}
	out.Add(newElectionStage(p, key))
	if e := would.Exemption(key); e != nil && !e.InBody { // the body is not awaited
		out.Add(exemptStage{e})
	}
	out.Add(newDryNarrowStage(would, key, p.withheldAction(key.Verb, wouldNarrow)))
	if s := newFenceStage(would, key); s != nil && (!s.Observe || s.Limit != nil) {
		s.Passes = s.Passes || s.Observe
		s.Observe, s.dry, s.withheld = true, true, p.withheldAction(key.Verb, wouldRefuse)
		out = append(out, s)
	}
	if s := newClusterScopedStage(would, key); s != nil && !s.Observe {
		s.Observe, s.withheld = true, p.withheldAction(key.Verb, wouldRefuse)
		if s.Exemption != nil {
			s.Exemption.InBody = false
		}
		out = append(out, s)
	}
	return out
}

// dryLockStage counts requests about locks.
type dryLockStage struct {
	locks lock.Set
	withheld
}

func (s *dryLockStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Exempt = s.concerned(x); x.Exempt {
		s.note(x)
	}
	return nil
}

func (s *dryLockStage) concerned(x *pipeline.State) bool {
	if x.Req.Info.Name != "" {
		return s.locks.Named(x.Req.Info.Namespace, x.Req.Info.Name) != nil
	}
	candidates := s.locks.In(x.Req.Info.Namespace)
	if len(candidates) == 0 || x.Req.Info.Verb != "create" {
		return false
	}
	body, whole := x.Peek()
	if !whole {
		return false
	}
	return slices.ContainsFunc(candidates, func(l *lock.Lock) bool {
		out, err := l.Request(x.Out.Header.Get("Content-Type"), body)
		return err == nil && out.Lock
	})
}

// dryNarrowStage counts lists, watches and deletecollections that would be narrowed.
type dryNarrowStage struct {
	all       bool                 // by a selector
	narrowing *isolation.Narrowing // or not nil: as it says
	sweep     *isolation.Border    // or not nil: in namespaces of other shards
	withheld
}

func newDryNarrowStage(p *Policy, key match.Kind, w withheld) pipeline.Stage {
	s := &dryNarrowStage{withheld: w}
	switch key.Verb {
	case "list", "watch":
		s.narrowing = p.Narrowing(key.GroupResource())
	case "deletecollection":
		if b, ok := p.Sweep(key); ok {
			s.sweep = &b
		}
	default:
		return nil
	}
	s.all = p.Selector(key.GroupResource()) != nil
	if !s.all && s.narrowing == nil && s.sweep == nil {
		return nil
	}
	return s
}

func (s *dryNarrowStage) Apply(x *pipeline.State) *pipeline.Outcome {
	namespace := x.Req.Info.Namespace
	if !x.Exempt && (s.all || s.narrowing != nil && s.narrowing.Narrows(namespace) || s.sweep != nil && s.sweep.Foreign(namespace)) {
		s.note(x)
	}
	return nil
}
