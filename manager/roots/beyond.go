package roots

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/undivided"
)

// compare compares what the members of the shards do beyond what their shards own. The result
// of the last leader stays until agents have reported to this one.
func (rt *root) compare(v view, state handover.State, now time.Time) {
	if last := rt.object.Status.Root; last != nil && !v.reported(state.Members, now) {
		rt.beyond.Result = undivided.Result{Undivided: last.Undivided, Foreign: last.ForeignWrites}
		return
	}
	var members []undivided.Member
	for _, m := range state.Members {
		if v.exists(m) {
			members = append(members, undivided.Member{Shard: m.Shard, Activity: v.observe(m.Node, m.UID).Activity})
		}
	}
	rt.beyond.Round(undivided.Compare(members, v.world.Namespaces), now)
}
