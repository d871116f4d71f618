package stages

import (
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/usage"
)

// observeStage counts the events of a watch that passes unchanged.
type observeStage struct {
	resource schema.GroupResource
	usage    *usage.Log
}

// newObserveStage returns nil unless the pod's requests pass unchanged, and a division could concern the watch.
func newObserveStage(p *Policy, key match.Kind) pipeline.Stage {
	if !p.Observes() || key.Verb != "watch" || key.MemberCluster || !isolation.Contended(key.GroupResource()) {
		return nil
	}
	return &observeStage{key.GroupResource(), &p.env.Observations.Usage}
}

func (s *observeStage) Apply(x *pipeline.State) *pipeline.Outcome {
	x.Responses.Add(s)
	return nil
}

// Respond reads what passes. What it cannot read passes, too.
func (s *observeStage) Respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	if encoding := resp.Get("Content-Encoding"); resp.Status != http.StatusOK || encoding != "" && encoding != "identity" {
		return nil
	}
	all := func(k filter.Key) bool {
		s.usage.Event(s.resource, k.Namespace, time.Now())
		return true
	}
	read, err := filter.New(resp.Body, all, filter.Options{
		ContentType: resp.Get("Content-Type"), Watch: true, Lenient: true, Hold: x.Memory.HoldRead, Give: x.Memory.GiveFiltered,
	})
	if err == nil {
		resp.Wrap(read)
	}
	return nil
}
