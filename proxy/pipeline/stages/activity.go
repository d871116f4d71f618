package stages

import (
	"strings"

	"github.com/ctrlmesh/ctrlmesh/proxy/activity"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// activityOf counts the writes and watches of one plan in the log of the pod, and the writes of
// divided resources in its outcomes.
type activityOf struct {
	*isolation.Activity
	counter  *activity.Counter
	outcomes *activity.Outcomes
}

// newActivity returns nil for requests that are not counted.
func newActivity(p *Policy, key match.Kind) pipeline.Activity {
	a := p.Division.Activity(key)
	if a == nil || !match.Storable(key.Group, key.Resource) {
		return nil
	}
	return activityOf{a, p.env.Observations.Activity.Counter(key.GroupResource(), a.Divided), &p.env.Observations.Outcomes}
}

// Written implements pipeline.Activity.
func (a activityOf) Written(x *pipeline.State) {
	namespace, name := x.Req.Info.Namespace, x.Req.Info.Name
	if x.Lock.Named != nil || strings.Contains(x.Out.Query, "dryRun=") || a.Everyones(namespace, name) {
		return
	}
	if a.Divided {
		a.outcomes.Wrote()
	}
	a.counter.Write(a.Key(namespace, name), x.Would == observedForeign || a.Foreign(x.Req.Cluster, namespace, name))
}

// Watched implements pipeline.Activity.
func (a activityOf) Watched(x *pipeline.State) (over func()) {
	if x.Req.Info.Namespace != "" || x.Req.Info.Name != "" {
		return nil
	}
	return a.counter.Watch()
}
