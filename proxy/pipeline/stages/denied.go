package stages

import (
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// deniedStage serves clients with some User-Agents as if there were no objects: lists are
// empty, watches have no events, and all other requests are refused.
type deniedStage struct {
	policy   *Policy
	empty    *narrowStage // of a list or watch; nil: requests are refused
	withheld withheld     // not empty: requests are counted for the dry run alone
}

// denies reports whether clients with a User-Agent are not served.
func (p *Policy) denies(agent string) bool {
	agents := match.Patterns(p.Message.GetSharding().GetDeniedUserAgents())
	return len(agents) > 0 && agents.Match(agent)
}

// newDeniedStage returns nil where all clients are served.
func newDeniedStage(p *Policy, key match.Kind) pipeline.Stage {
	if len(p.Message.GetSharding().GetDeniedUserAgents()) == 0 || p.Would != nil {
		return nil
	}
	s := &deniedStage{policy: p}
	if key.Verb == "list" || key.Verb == "watch" {
		s.empty = emptyStage(key.GroupResource(), key.Verb == "watch")
	}
	return s
}

func (s *deniedStage) Apply(x *pipeline.State) *pipeline.Outcome {
	agent := x.Req.Header.Get("User-Agent")
	switch {
	case x.Lock.Named != nil || !s.policy.denies(agent):
		return nil
	case s.withheld != "":
		s.withheld.note(x)
		return nil
	case s.empty != nil:
		end := s.empty.Apply(x)
		x.Exempt = true // there is nothing left to narrow
		return end
	}
	refused := status.New(http.StatusForbidden, metav1.StatusReasonForbidden, 0,
		"%s %s: requests with User-Agent %q are served in the default subset alone: spec.root.defaultOnlyUserAgents of the root of ShardingConfig %s/%s",
		x.Req.Info.Verb, x.Req.Info.Resource, pipeline.Bounded(agent), s.policy.env.Info.Namespace, s.policy.Shard)
	refused.ErrStatus.Details = &metav1.StatusDetails{Name: x.Req.Info.Name, Group: x.Req.Info.APIGroup, Kind: x.Req.Info.Resource}
	return pipeline.RefusalFor(meshv1.RefusedUserAgent, refused)
}

// newDryDeniedStage returns the stage that counts what newDeniedStage would do.
func newDryDeniedStage(p, would *Policy, key match.Kind) pipeline.Stage {
	s, ok := newDeniedStage(would, key).(*deniedStage)
	if !ok {
		return nil
	}
	action := wouldRefuse
	if s.empty != nil {
		action = wouldNarrow
	}
	s.withheld = p.withheldAction(key.Verb, action)
	return s
}
