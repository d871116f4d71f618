package roots

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// Enacted is by what configurations were made to follow what their shards act by.
type Enacted struct {
	// By is what the shards of a root acted by; nil if that was not on record.
	By map[types.UID]*v1alpha1.ActingSpec
	// Asked is what the spec of a root asks for.
	Asked map[types.UID]*v1alpha1.ActingSpec
	// Changes are what the shards do not act by yet.
	Changes map[types.UID]*acting.Change
}

// Enact replaces, in roots among configs, what their shards do not act by yet. It must be
// called before [Resolve]. known is a result of Known.
func Enact(configs []*v1alpha1.ShardingConfig, known map[origin.Name]compile.Root) *Enacted {
	e := &Enacted{By: map[types.UID]*v1alpha1.ActingSpec{}, Asked: map[types.UID]*v1alpha1.ActingSpec{}}
	for _, c := range configs {
		if c.Spec.Root != nil {
			e.Asked[c.UID] = acting.Of(&c.Spec)
		}
	}
	e.Changes = acting.Enact(configs, func(c *v1alpha1.ShardingConfig) (compile.Root, bool) {
		root, ok := known[origin.Of(c)]
		if ok {
			e.By[c.UID] = root.Acting
		}
		return root, ok
	})
	return e
}

// follow reports whether a root acted by a spec when the configurations were listed.
func (e *Enacted) follow(uid types.UID, by *v1alpha1.ActingSpec) bool {
	if e == nil {
		return false
	}
	was, ok := e.By[uid]
	return ok && equality.Semantic.DeepEqual(was, by)
}

// Same reports whether the shards of all roots acted by the same.
func (e *Enacted) Same(other *Enacted) bool {
	if e == nil || other == nil {
		return e == other
	}
	return equality.Semantic.DeepEqual(e.By, other.By)
}

// current reports whether the configuration and the policies of a world follow from what the
// shards act by.
func (rt *root) current(w World) bool {
	return w.Enacted.follow(rt.uid, rt.acting) && (w.Compiled.Policies == nil || w.CompiledBy.follow(rt.uid, rt.acting))
}

// actsBy returns what the shards act by once a state is written. Nothing changes before no
// shard owns anything and the agents have confirmed that no member leads.
func (rt *root) actsBy(v view, state handover.State) *v1alpha1.ActingSpec {
	switch {
	case v.change == nil:
		return v.asked
	case !state.Holds() && len(state.Moves) == 0 && v.quiet(state.Members):
		return v.change.To
	}
	return rt.acting
}

// changes reports whether the shards must release what they own, so that they can act by
// another spec. They keep it while that spec names resources that do not exist.
func (v view) changes() bool { return v.change != nil && v.unknown.Message == "" }

// undivided returns the obstacle that the spec names resources that do not exist; nil if it
// does not. Shards that act by the spec may go on while discovery fails.
func (v view) undivided(state handover.State) *locks.Obstacle {
	if v.unknown.Message == "" || v.unknown.Undetermined && v.change == nil && state.Holds() {
		return nil
	}
	message := v.unknown.Message + "; nothing is granted before the apiserver serves it"
	if state.Holds() {
		message = v.unknown.Message
		if v.change != nil {
			message += "; shards act by the former spec until the apiserver serves it"
		}
	}
	return &locks.Obstacle{Reason: v1alpha1.ReasonUnknownResource, Message: message}
}

// changing returns the obstacle that the spec changes what shards act by; nil if it does not.
func (v view) changing(state handover.State) *locks.Obstacle {
	if !v.changes() {
		return nil
	}
	message := fmt.Sprintf("%s changed: no shard acts by the new spec before all have released what they own by the former one", strings.Join(v.change.Fields, ", "))
	holding := collect.Filter(slices.Sorted(maps.Keys(state.Shards)), func(name string) bool { return !state.Shards[name].Held.Empty() })
	if len(holding) > 0 {
		message += "; waiting for shard " + firstOf(holding)
	}
	return &locks.Obstacle{Reason: v1alpha1.ReasonSpecChanged, Message: message}
}
