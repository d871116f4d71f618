package stages

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// clusterScopedStage refuses, or counts, writes of objects in no namespace that another
// shard alone may send.
type clusterScopedStage struct {
	*isolation.ClusterScoped
	policy  *Policy
	foreign prometheus.Counter
	dryRun  *dryRun // not nil: they are observed for the dry run alone
}

// newClusterScopedStage returns nil for requests that every shard may send.
func newClusterScopedStage(p *Policy, key match.Kind) *clusterScopedStage {
	c := p.ClusterScoped(key)
	if c == nil {
		return nil
	}
	action := "refused"
	if c.Observe {
		action = "observed"
	}
	return &clusterScopedStage{ClusterScoped: c, policy: p, foreign: p.Metrics.Counter(p.env.Metrics.Foreign, metrics.Verb(key.Verb), action)}
}

func (s *clusterScopedStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Exempt || !s.Refuses(x.Req.Info.Namespace) {
		return nil
	}
	if covered, end := covers(s.Exemption, x); end != nil || covered {
		return end
	}
	switch {
	case s.dryRun != nil:
		s.dryRun.note(x)
		return nil
	case s.policy.Standby:
		return s.policy.inStandby()
	}
	s.foreign.Inc()
	if s.Observe {
		return nil
	}
	return s.policy.forbidden(x.Req.Info, "a cluster-scoped object", "shard "+s.Owner+" alone writes cluster-scoped objects")
}
