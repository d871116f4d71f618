package edits

import (
	"slices"

	"github.com/ctrlmesh/ctrlmesh/tests/explore/search"
)

// user visits what the user may do.
func (x *explorer) user(w world, next visit) {
	if x.later() && !w.later {
		n := w
		n.later = true
		next(n, search.Step{What: "the apiserver serves another resource"})
	}
	x.deletePods(w, next)
	if w.left.edits == 0 || !w.roots[0].exists {
		return
	}
	edited := w
	edited.left.edits--
	for i, s := range x.options.Specs {
		if n := edited; s != w.roots[0].spec {
			n.roots[0].spec = s
			n.roots[0].generation++
			next(n, search.Step{What: "user writes spec", A: i})
		}
	}
	if x.options.Deletes && !w.roots[0].deleted {
		edited.roots[0].deleted = true
		edited.roots[0].generation++
		next(edited, search.Step{What: "user deletes the root"})
		edited.roots[0] = root{}
		next(edited, search.Step{What: "user deletes the root with its finalizer"})
	}
}

func (x *explorer) later() bool {
	return slices.ContainsFunc(x.options.Specs, func(s Spec) bool { return s.Resources == Later })
}

// deletePods visits the deletion of a pod, and of all of them.
func (x *explorer) deletePods(w world, next visit) {
	all := w
	for i, p := range w.pods {
		all.pods[i].object = p.object && p.root > 0
		if n := w; p.object && w.left.deletions > 0 {
			n.left.deletions--
			n.pods[i].object = false
			next(n, search.Step{What: "user deletes a pod", A: i})
		}
	}
	if x.options.Uninstalls && all != w {
		next(all, search.Step{What: "user deletes the workload"})
	}
}
