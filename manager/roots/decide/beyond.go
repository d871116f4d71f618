package decide

import (
	"slices"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/idle"
	"github.com/ctrlmesh/ctrlmesh/manager/undivided"
)

// compare compares what the members of the shards do beyond what their shards own. The result
// of the last leader stays until agents have reported to this one.
func (d *deciding) compare() {
	v := d.v
	if last := v.Stored.Status.Root; last != nil && !v.reported(d.next.Members) {
		d.memory.beyond.Result = undivided.Result{Undivided: last.Undivided, Foreign: last.ForeignWrites}
		return
	}
	var members []undivided.Member
	for _, m := range d.next.Members {
		if v.exists(m) {
			members = append(members, undivided.Member{Shard: m.Shard, Activity: v.observe(m.Node, m.UID).Activity})
		}
	}
	d.memory.beyond.Round(undivided.Compare(members, v.Namespaces), v.now)
}

// markIdle marks the shards that never write. out has the weights of the shards. Until agents
// have reported to this leader, the marks of the last one stay.
func (d *deciding) markIdle(out *v1alpha1.RootStatus) {
	var marked []string
	if last := d.v.Stored.Status.Root; last != nil {
		for _, s := range last.Shards {
			if s.Idle {
				marked = append(marked, s.Name)
			}
		}
	}
	if d.v.reported(d.next.Members) {
		shards := collect.Map(out.Shards, func(s v1alpha1.ShardStatus) idle.Shard { return d.v.workOf(s, d.next) })
		marked = d.memory.quiet.Round(shards, marked, d.v.now)
	}
	for i := range out.Shards {
		out.Shards[i].Idle = slices.Contains(marked, out.Shards[i].Name)
	}
}

// workOf returns what the pods of a shard do.
func (v *view) workOf(s v1alpha1.ShardStatus, state handover.State) idle.Shard {
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
