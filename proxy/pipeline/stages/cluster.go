package stages

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// clusterScopedStage refuses, or counts, writes of objects in no namespace that another
// shard alone may send.
type clusterScopedStage struct {
	*isolation.ClusterScoped
	policy   *Policy
	refused  prometheus.Counter // unused with Observe
	withheld withheld           // of Observe
}

// newClusterScopedStage returns nil for requests that every shard may send.
func newClusterScopedStage(p *Policy, key match.Kind) pipeline.Stage {
	c := p.Division.ClusterScoped(key)
	if c == nil {
		return nil
	}
	s := &clusterScopedStage{ClusterScoped: c, policy: p}
	if c.Observe {
		s.withheld = p.withheldAction(key.Verb, observedForeign)
	} else {
		s.refused = p.Tally.Metrics.Action(p.env.Metrics.Foreign, key.Verb, "refused")
	}
	return s
}

func (s *clusterScopedStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Exempt || !s.Refuses(x.Req.Info.Namespace) {
		return nil
	}
	if covered, end := covers(s.Exemption, x); end != nil || covered {
		return end
	}
	switch {
	case s.Observe:
		s.withheld.note(x)
		return nil
	case s.policy.Division.Standby:
		return s.policy.inStandby()
	}
	s.refused.Inc()
	return s.policy.forbidden(x.Req.Info, "a cluster-scoped object", "shard "+s.Owner+" alone writes cluster-scoped objects")
}
