package stages

import (
	"github.com/prometheus/client_golang/prometheus"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// memberClusterStage refuses, or counts, requests into member clusters of other shards: reads, too, so
// that an operator does not take such a cluster for an empty one.
type memberClusterStage struct {
	*isolation.MemberClusters
	policy   *Policy
	fills    bool               // a list or watch, which may fill a cache
	refused  prometheus.Counter // unused with Observe
	withheld withheld           // of Observe, or of a dry run
}

// newMemberClusterStage returns nil if every shard may send requests into all clusters.
func newMemberClusterStage(p *Policy, key match.Kind) pipeline.Stage {
	decides, action := p, observedForeign
	if p.Would != nil {
		decides, action = p.Would, wouldRefuse
	}
	m := decides.Division.MemberClusters()
	if m == nil || p.Would != nil && m.Observe {
		return nil
	}
	s := &memberClusterStage{MemberClusters: m, policy: p, fills: key.Verb == "list" || key.Verb == "watch"}
	if p.Would != nil || m.Observe {
		s.Observe, s.withheld = true, p.withheldAction(key.Verb, action)
	} else {
		s.refused = p.Tally.Metrics.Action(p.env.Metrics.Foreign, key.Verb, "refused")
	}
	return s
}

func (s *memberClusterStage) Apply(x *pipeline.State) *pipeline.Outcome {
	cluster := x.Req.Cluster
	if !s.Foreign(cluster) {
		return nil
	}
	if s.Observe {
		s.withheld.note(x)
		return nil
	}
	if s.fills {
		s.policy.env.Ledger.Refused(viewOf(x, pipeline.Parameters(x.Req.Query)))
	}
	if s.Standby {
		return pipeline.RefusalFor(meshv1.RefusedStandby, status.Unavailable(standbyRetry, "pod %s is in standby, and requests into cluster %s are refused until it is given one: %s",
			s.policy.env.ID, pipeline.Bounded(cluster), s.policy.standbyReason()))
	}
	s.refused.Inc()
	return s.policy.forbidden(x.Req.Info, "cluster "+pipeline.Bounded(cluster), s.policy.Division.Owner(cluster))
}

// Classify determines what a request asks for, by the paths of member clusters.
func (p *Policy) Classify(r *pipeline.Request) { r.Classify(p.clusters) }

// RefusesNow reports whether the policy refuses a request that another one has passed.
func (p *Policy) RefusesNow(x *pipeline.State) bool {
	if x.Req.Cluster != "" && !p.Division.DividesMemberClusters() {
		return p.Division.MemberClusters().Refuses(x.Req.Cluster)
	}
	return p.Division.Refuses(x.Plan.Key, x.Req.Info.Namespace, x.Req.Info.Name)
}
