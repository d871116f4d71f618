package roots

import (
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
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
// called before [Resolve]. known is a result of States.
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

// Follows reports whether the configuration and the policies of an Input follow from what a root
// acts by.
func (w Input) Follows(uid types.UID, by *v1alpha1.ActingSpec) bool {
	return w.Enacted.follow(uid, by) && (w.Compiled.Policies == nil || w.CompiledBy.follow(uid, by))
}

// Same reports whether the shards of all roots acted by the same.
func (e *Enacted) Same(other *Enacted) bool {
	if e == nil || other == nil {
		return e == other
	}
	return equality.Semantic.DeepEqual(e.By, other.By)
}
