package decide

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// MaxNamed bounds the pods and shards that a message names.
const MaxNamed = 5

// status returns the status to write.
func (d *deciding) status() v1alpha1.ShardingConfigStatus {
	v, state := d.v, d.next
	config := v.Spec.Config.DeepCopy()
	v.Stored.Status.DeepCopyInto(&config.Status)
	obstacle := d.obstacle()
	if v.changes() || d.unplanned && obstacle == nil {
		config.Generation = config.Status.ObservedGeneration
	}
	out := Save(state)
	out.Acting, out.Rollout = d.actsBy(), d.rollout.status
	d.addWeights(&out)
	d.markIdle(&out)
	return status.OfRoot(status.RootInput{
		Config: config, State: state, Root: out, Pods: v.Pods.Workload, Conflicts: v.Spec.Conflicts, TooLarge: v.Spec.TooLarge, Problem: v.Spec.Problem,
		Restarting: d.memory.evictions.why, Unconfirmed: d.unconfirmed, Leaders: d.memory.leading.leaders, Undivided: d.memory.beyond.Result,
		Common: status.Common{
			Locks: v.locks, Obstacle: obstacle, Stamping: v.Stamping, MissingBundle: v.MissingBundle, Observe: v.observe, Now: v.now, Since: v.Agents.Since,
			Wanted: func(uid string) string { return v.policy(uid).GetVersion() },
		},
	})
}

// obstacle returns why shards do not act, or not as a whole; nil if they do.
func (d *deciding) obstacle() *locks.Obstacle {
	v, state := d.v, d.next
	switch {
	case state.RolledBack:
		return &locks.Obstacle{Reason: v1alpha1.ReasonRolledBack,
			Message: "agents have had later policies than status.root accounts for, as after a restore of etcd; all members are in standby until each of them has confirmed that, then the root starts anew"}
	case state.Holds() && !state.Evidence.OthersConfirmed && v.now.Sub(v.Stored.ReadAt) >= status.Grace:
		return d.unverified()
	case compile.Withdrawn(v.Spec.Config):
		return nil
	case v.undivided(state) != nil:
		return v.undivided(state)
	case v.changes():
		return d.changing()
	case v.Spec.Config.Spec.DryRun:
		return nil
	case !state.Holds():
		return d.gate.closed
	case !state.Verified() && v.now.Sub(v.Stored.ReadAt) >= status.Grace:
		return d.unverified()
	}
	return v.lockObstacle()
}

// lockObstacle returns why shards that own keys may lack a leader; nil if there is no reason.
func (v *view) lockObstacle() *locks.Obstacle {
	switch {
	case v.Locks.Forbidden != "":
		return &locks.Obstacle{Reason: v1alpha1.ReasonLockForbidden, Message: v.Locks.Forbidden}
	case v.Locks.Undiscovered != nil:
		return v.Locks.Undiscovered
	case len(v.locks) == 0:
		return v.outsideActs("")
	}
	if unheld := locks.Unheld(v.locks, v.lockState, v.holder); unheld != nil || !v.bySelector() {
		return unheld
	}
	return v.outsideActs("")
}

// unverified returns the obstacle that agents have not confirmed, since the state was read,
// what their pods act on.
func (d *deciding) unverified() *locks.Obstacle {
	state := d.next
	names := d.v.strangers(state.Members, d.removed)
	if state.Evidence.OthersConfirmed {
		names = collect.Map(state.Unconfirmed(), func(m handover.Member) string { return fmt.Sprintf("pod %s on node %s", m.Name, m.Node) })
	}
	message := "no keys move until the agents have confirmed that pods without a shard act on nothing, because they may be in shards of which a restored backup does not know"
	if state.Evidence.OthersConfirmed {
		shards := collect.Filter(slices.Sorted(maps.Keys(state.Shards)), state.Pinned)
		message = "the agents have not confirmed all that status.root says, which may have been restored from a backup"
		if len(shards) > 0 {
			message += "; no keys move from or to shard " + firstOf(shards) + " until then"
		}
	}
	if len(names) > 0 {
		message += "; waiting for " + firstOf(names)
	}
	return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: message}
}

// addWeights adds the namespaces and weights of shards to a status.
func (d *deciding) addWeights(out *v1alpha1.RootStatus) {
	weights, sizes := d.v.Weights.Of, d.sizes()
	owned := map[string]sharding.Scope{}
	for i := range out.Shards {
		s := &out.Shards[i]
		owned[s.Name] = d.next.Shards[s.Name].Owned
		s.Namespaces, s.Weight = sizes[s.Name].namespaces, sizes[s.Name].weight
	}
	out.Suggestion, out.Weighing = d.memory.plan.suggestion, d.v.Weights.Problem
	if len(weights) > 0 && len(out.Shards) > 0 {
		out.Skew = fmt.Sprintf("%.2f", layout.Skew(owned, d.v.Spec.Config.Spec.Root, weights))
	}
}

// size is how much a shard owns: the number of existing namespaces, and their weight.
type size struct {
	namespaces int32
	weight     int64
}

// sizes returns how much each shard owns.
func (d *deciding) sizes() map[string]size {
	out := map[string]size{}
	for ns, weight := range d.v.Weights.Of {
		h := sharding.Hash(ns)
		for name, s := range d.next.Shards {
			if s.Owned.OwnsHash(h) {
				out[name] = size{out[name].namespaces + 1, out[name].weight + weight}
			}
		}
	}
	return out
}

// firstOf lists the first MaxNamed names.
func firstOf(names []string) string {
	if len(names) > MaxNamed {
		names = append(names[:MaxNamed], "and more")
	}
	return strings.Join(names, ", ")
}
