package decide

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
)

// forLife is longer than any lease that is renewed.
const forLife = 30 * 24 * time.Hour

// actsBy returns what the shards act by once the next state is written. Nothing changes before no
// shard owns anything, the agents have confirmed that no member leads, and the leases of former
// leaders are over.
func (d *deciding) actsBy() *v1alpha1.ActingSpec {
	v := d.v
	switch {
	case v.Spec.Change == nil:
		return v.Spec.Asked
	case !d.memory.releasedAt.IsZero() && d.lingers() == 0:
		return v.Spec.Change.To
	}
	return v.Stored.Acting
}

// changes reports whether the shards must release what they own, so that they can act by
// another spec. They keep it while that spec names resources that do not exist.
func (v *view) changes() bool { return v.Spec.Change != nil && v.Spec.Unknown.Message == "" }

// undivided returns the obstacle that the spec names resources that do not exist; nil if it
// does not. Shards that act by the spec may go on while discovery fails.
func (v *view) undivided(state handover.State) *locks.Obstacle {
	if v.Spec.Unknown.Message == "" || v.Spec.Unknown.Undetermined && v.Spec.Change == nil && state.Holds() {
		return nil
	}
	message := v.Spec.Unknown.Message + "; nothing is granted before the apiserver serves it"
	if state.Holds() {
		message = v.Spec.Unknown.Message
		if v.Spec.Change != nil {
			message += "; shards act by the former spec until the apiserver serves it"
		}
	}
	return &locks.Obstacle{Reason: v1alpha1.ReasonUnknownResource, Message: message}
}

// changing returns the obstacle that the spec changes what shards act by; nil if it does not.
func (d *deciding) changing() *locks.Obstacle {
	v, state := d.v, d.next
	if !v.changes() {
		return nil
	}
	message := fmt.Sprintf("%s changed: no shard acts by the new spec before all have released what they own by the former one", strings.Join(v.Spec.Change.Fields, ", "))
	holding := collect.Filter(slices.Sorted(maps.Keys(state.Shards)), func(name string) bool { return !state.Shards[name].Owned.Empty() })
	if len(holding) > 0 {
		message += "; waiting for shard " + firstOf(holding)
	} else if left := d.lingers(); !d.memory.releasedAt.IsZero() && left > forLife {
		message += "; waiting until the pods that lead for life are deleted"
	} else if !d.memory.releasedAt.IsZero() && left > 0 {
		message += fmt.Sprintf("; waiting until former leaders have stopped, whose leases last %s", v.Locks.Lease)
	}
	return &locks.Obstacle{Reason: v1alpha1.ReasonSpecChanged, Message: message}
}

// grantsNothing reports whether the shards of a root must own nothing. Under a dry run each
// pod acts on everything, so that a first grant follows it. A change of what shards act by
// waits until none owns anything.
func (v *view) grantsNothing() bool {
	return compile.Withdrawn(v.Spec.Config) || v.Spec.Config.Spec.DryRun || v.changes() || v.overrun()
}

// overrun reports whether pods outside the mesh act beside shards. Of an operator without locks nothing
// holds them back, such as when its pod template has lost the label. The shards act again when these
// pods are gone, as after the first grant.
func (v *view) overrun() bool {
	return v.Stored.State.Holds() && len(v.locks) == 0 && len(compile.NamedLocks(v.Spec.Config)) == 0 && v.Outside.Act
}

// A leader that can no longer renew its lock goes on for less than its lease lasts. Standby
// refuses its writes meanwhile; the next spec might not: under a dry run all members act, and
// under another lock another pod of the shard may lead as well.

// Lingering returns the locks of shards whose leases Decide needs: while shards that own nothing
// wait to act by another spec.
func Lingering(f Facts, now time.Time) (out []types.NamespacedName) {
	if f.Spec.Change == nil || f.Stored.State.Holds() {
		return nil
	}
	v := newView(f, now)
	for _, lock := range compile.OperatorLocks(v.Spec.Config, v.locks) {
		for shard := range f.Stored.State.Shards {
			out = append(out, types.NamespacedName{Namespace: lock.Namespace, Name: compile.UpstreamLock(lock.Name, shard)})
		}
	}
	return out
}

// outlast remembers since when a change waits for leaders that may go on: since no shard owns
// anything, and no member leads under a policy.
func (d *deciding) outlast() {
	v, state, m := d.v, d.next, &d.memory
	switch {
	case v.Spec.Change == nil || state.Holds() || len(state.Moves) > 0 || !v.quiet(state.Members):
		m.releasedAt = time.Time{}
	case m.releasedAt.IsZero():
		m.releasedAt = v.now
	}
}

// lingers reports for how long former leaders may go on.
func (d *deciding) lingers() time.Duration {
	return max(0, d.v.Locks.Lease-d.v.now.Sub(d.memory.releasedAt))
}
