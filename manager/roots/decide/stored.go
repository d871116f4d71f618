package decide

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// Save converts a state to the form in which it is written. Times are truncated to seconds.
func Save(s handover.State) v1alpha1.RootStatus {
	out := v1alpha1.RootStatus{MinSerial: s.MinSerial, RolledBack: s.RolledBack}
	for _, name := range slices.Sorted(maps.Keys(s.Shards)) {
		shard := s.Shards[name]
		out.Shards = append(out.Shards, v1alpha1.ShardStatus{
			Name: name, Serial: shard.Serial, Held: shard.Owned.Strings(), Target: shard.Target.Strings(), Wanted: shard.Wanted.Strings(),
		})
	}
	for _, m := range s.Members {
		out.Assignments = append(out.Assignments, v1alpha1.Assignment(m))
	}
	slices.SortFunc(out.Assignments, func(a, b v1alpha1.Assignment) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	for _, m := range s.Moves {
		out.Handovers = append(out.Handovers, v1alpha1.HandoverStatus{
			From: m.From, To: m.To, Keys: m.Keys.Strings(), Phase: string(m.Phase), Since: seconds(m.Since), Began: seconds(m.Began),
		})
	}
	return out
}

func seconds(t time.Time) metav1.Time { return metav1.NewTime(t.Truncate(time.Second)) }

// Load converts the result of Save back to a state; nil is the state of a new root.
func Load(r *v1alpha1.RootStatus) (handover.State, error) {
	s := handover.State{Shards: map[string]handover.Shard{}, Members: map[string]handover.Member{}}
	if r == nil {
		return s, nil
	}
	s.MinSerial, s.RolledBack = r.MinSerial, r.RolledBack
	owned := sharding.Scope{}
	for _, shard := range r.Shards {
		var scopes [3]sharding.Scope
		for i, in := range []struct {
			field string
			texts []string
		}{{"held", shard.Held}, {"target", shard.Target}, {"wanted", shard.Wanted}} {
			var err error
			if scopes[i], err = sharding.Parse(in.texts); err != nil {
				return s, fmt.Errorf("status.root.shards[%s].%s: %w", shard.Name, in.field, err)
			}
		}
		if owned.Overlaps(scopes[0]) {
			return s, fmt.Errorf("status.root.shards[%s].held: another shard owns %s too", shard.Name, owned.Intersect(scopes[0]))
		}
		owned = sharding.Union(owned, scopes[0])
		s.Shards[shard.Name] = handover.Shard{Serial: shard.Serial, Owned: scopes[0], Target: scopes[1], Wanted: scopes[2]}
	}
	for _, a := range r.Assignments {
		if _, known := s.Shards[a.Shard]; !known {
			return s, fmt.Errorf("status.root.assignments[%s]: there is no shard %q", a.UID, a.Shard)
		}
		s.Members[a.UID] = handover.Member(a)
	}
	for i, h := range r.Handovers {
		keys, err := sharding.Parse(h.Keys)
		if err != nil {
			return s, fmt.Errorf("status.root.handovers[%d].keys: %w", i, err)
		}
		s.Moves = append(s.Moves, handover.Move{From: h.From, To: h.To, Keys: keys, Phase: handover.Phase(h.Phase), Since: h.Since.Time, Began: h.Began.Time})
	}
	return s, nil
}

// Durable returns the part of a status that is state. The rest is for display.
func Durable(r *v1alpha1.RootStatus) v1alpha1.RootStatus {
	var out v1alpha1.RootStatus
	if r == nil {
		return out
	}
	for _, s := range r.Shards {
		out.Shards = append(out.Shards, v1alpha1.ShardStatus{Name: s.Name, Serial: s.Serial, Held: s.Held, Target: s.Target, Wanted: s.Wanted})
	}
	out.Assignments, out.MinSerial, out.RolledBack, out.Acting = r.Assignments, r.MinSerial, r.RolledBack, r.Acting
	for _, h := range r.Handovers {
		h.WaitsFor = nil
		out.Handovers = append(out.Handovers, h)
	}
	if r.Rollout != nil && len(r.Rollout.RolledBack) > 0 {
		out.Rollout = &v1alpha1.RolloutStatus{RolledBack: r.Rollout.RolledBack}
	}
	return out
}

// wanted returns the scopes of the last plan.
func wanted(s handover.State) map[string]sharding.Scope {
	out := map[string]sharding.Scope{}
	for name, shard := range s.Shards {
		if !shard.Wanted.Empty() {
			out[name] = shard.Wanted
		}
	}
	return out
}
