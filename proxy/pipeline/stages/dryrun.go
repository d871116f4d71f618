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
	return p.Tally.Metrics.Action(in, verb, action)
}

// inDryRun returns a constructor whose stages count what a policy would do without its dry run.
func inDryRun(construct func(p, would *Policy, key match.Kind) pipeline.Stage) constructor {
	return func(p *Policy, key match.Kind) pipeline.Stage {
		if p.Would == nil {
			return nil
		}
		return construct(p, p.Would, key)
	}
}

// dryLockStage counts requests about locks.
type dryLockStage struct {
	locks lock.Set
	withheld
}

// newDryLockStage returns nil where no lock would be renamed.
func newDryLockStage(p, would *Policy, key match.Kind) pipeline.Stage {
	if len(would.Locks) == 0 || !mayLock(key) {
		return nil
	}
	return &dryLockStage{would.Locks, p.withheldAction(key.Verb, wouldRename)}
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

// newDryNarrowStage returns nil where nothing would be narrowed.
func newDryNarrowStage(p, would *Policy, key match.Kind) pipeline.Stage {
	s := &dryNarrowStage{withheld: p.withheldAction(key.Verb, wouldNarrow)}
	switch key.Verb {
	case "list", "watch":
		s.narrowing = would.Division.Narrowing(key.GroupResource())
	case "deletecollection":
		if b, ok := would.Division.Sweep(key); ok {
			s.sweep = &b
		}
	default:
		return nil
	}
	s.all = would.Division.Selects(key.GroupResource())
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

// newDryExemptStage returns nil where nothing is exempt by its path: the body is not awaited.
func newDryExemptStage(_, would *Policy, key match.Kind) pipeline.Stage {
	if e := would.Division.Exemption(key); e != nil && !e.InBody {
		return exemptStage{e}
	}
	return nil
}

// newDryFenceStage returns the stage that counts what newFenceStage would refuse.
func newDryFenceStage(p, would *Policy, key match.Kind) pipeline.Stage {
	s, ok := newFenceStage(would, key).(*fenceStage)
	if !ok || s.Observe && s.Limit == nil {
		return nil
	}
	s.Passes = s.Passes || s.Observe
	s.Observe, s.dry, s.withheld = true, true, p.withheldAction(key.Verb, wouldRefuse)
	return s
}

// newDryClusterScopedStage returns the stage that counts what newClusterScopedStage would refuse.
func newDryClusterScopedStage(p, would *Policy, key match.Kind) pipeline.Stage {
	s, ok := newClusterScopedStage(would, key).(*clusterScopedStage)
	if !ok || s.Observe {
		return nil
	}
	s.Observe, s.withheld = true, p.withheldAction(key.Verb, wouldRefuse)
	if s.Exemption != nil {
		s.Exemption.InBody = false
	}
	return s
}
