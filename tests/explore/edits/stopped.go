package edits

import (
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
)

// stopped returns what is wrong with a world in which nothing happens by itself: who should act
// does not.
func (x *explorer) stopped(w world) string {
	r := w.roots[0]
	record := x.records.all[w.manager.records[0]]
	switch {
	case !r.exists:
		return ""
	case r.deleted:
		if slices.ContainsFunc(w.pods[:], func(p pod) bool { return p.object && p.root == 0 && !p.both }) {
			return "" // until they are evicted, which time decides
		}
		return "a deleted root stays"
	case r.spec.DryRun:
		if !record.acting.DryRun {
			return "a dry run does not begin"
		}
		return ""
	case r.spec.unserved(w.later) && len(x.options.Specs) > 2:
		return "" // the shards may have released what they own for another spec
	case w.outside && (r.spec.Lock == NoLock || w.locks[r.spec.Lock] == byOutside || x.options.Discovers && w.locks[LockA] == byOutside):
		return ""
	}
	var all sharding.Scope
	for _, s := range record.state.Shards {
		all = sharding.Union(all, s.Owned)
	}
	switch {
	case !all.Everything():
		return "the shards do not own everything"
	case !r.spec.unserved(w.later) && !equality.Semantic.DeepEqual(record.acting, acting.Of(&r.config(0, "ns").Spec)):
		return "the shards do not act by the spec"
	}
	return ""
}
