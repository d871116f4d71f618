package roots

import (
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/idle"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
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

// markIdle marks the shards that never write. out has the weights of the shards. Until agents
// have reported to this leader, the marks of the last one stay.
func (rt *root) markIdle(out *v1alpha1.RootStatus, v view, state handover.State, now time.Time) {
	var marked []string
	if last := rt.object.Status.Root; last != nil {
		for _, s := range last.Shards {
			if s.Idle {
				marked = append(marked, s.Name)
			}
		}
	}
	if v.reported(state.Members, now) {
		shards := collect.Map(out.Shards, func(s v1alpha1.ShardStatus) idle.Shard { return v.workOf(s, state) })
		marked = rt.quiet.Round(shards, marked, now)
	}
	for i := range out.Shards {
		out.Shards[i].Idle = slices.Contains(marked, out.Shards[i].Name)
	}
}

// workOf returns what the pods of a shard do.
func (v view) workOf(s v1alpha1.ShardStatus, state handover.State) idle.Shard {
	out := idle.Shard{Name: s.Name, Objects: s.Weight}
	for _, m := range state.Members {
		if m.Shard != s.Name || !v.exists(m) {
			continue
		}
		for _, a := range v.observe(m.Node, m.UID).Activity {
			out.Writes += a.GetWrites()
			out.Watches = out.Watches || a.GetDivided() && a.GetWatched()
		}
	}
	return out
}
