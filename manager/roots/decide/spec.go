package decide

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
)

// actsBy returns what the shards act by once a state is written. Nothing changes before no
// shard owns anything and the agents have confirmed that no member leads.
func (v *view) actsBy(state handover.State) *v1alpha1.ActingSpec {
	switch {
	case v.Spec.Change == nil:
		return v.Spec.Asked
	case !state.Holds() && len(state.Moves) == 0 && v.quiet(state.Members):
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
func (v *view) changing(state handover.State) *locks.Obstacle {
	if !v.changes() {
		return nil
	}
	message := fmt.Sprintf("%s changed: no shard acts by the new spec before all have released what they own by the former one", strings.Join(v.Spec.Change.Fields, ", "))
	holding := collect.Filter(slices.Sorted(maps.Keys(state.Shards)), func(name string) bool { return !state.Shards[name].Held.Empty() })
	if len(holding) > 0 {
		message += "; waiting for shard " + firstOf(holding)
	}
	return &locks.Obstacle{Reason: v1alpha1.ReasonSpecChanged, Message: message}
}

// grantsNothing reports whether the shards of a root must own nothing. Under a dry run each
// pod acts on everything, so that a first grant follows it. A change of what shards act by
// waits until none owns anything.
func (v *view) grantsNothing() bool {
	return compile.Withdrawn(v.Spec.Config) || v.Spec.Config.Spec.DryRun || v.changes()
}
