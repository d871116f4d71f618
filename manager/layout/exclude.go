package layout

import (
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Exclude shares resources among all subsets of a root that divides them by "*", and returns
// those. excluded are the resources that the mesh or its administrator excludes from division;
// a resource "*" stands for all of its group. The root of the spec is replaced, not changed in
// place.
func Exclude(spec *v1alpha1.ShardingConfigSpec, excluded []schema.GroupResource) (shared []schema.GroupResource) {
	if spec.Root == nil || !ByLabels(spec.Root) {
		return nil
	}
	limits := slices.Concat(spec.Root.ResourceSelector, spec.Limits)
	out := spec.Root.DeepCopy()
	for _, x := range excluded {
		if slices.ContainsFunc(limits, func(l v1alpha1.ObjectLimiter) bool { return includes(l.RelateResources, x) }) {
			shared = append(shared, x)
			out.Shared = append(out.Shared, v1alpha1.SharedObjects{
				APIGroups: []string{x.Group}, Resources: []string{x.Resource}, Writes: v1alpha1.SharedWritesEveryone,
			})
		}
	}
	if len(shared) > 0 {
		spec.Root = out
	}
	return shared
}

// Wide reports whether a name stands for several resources, so that its author may not know all
// of them.
func Wide(gr schema.GroupResource) bool { return gr.Group == "*" || gr.Resource == "*" }

// includes reports whether a wide name in a list includes a resource.
func includes(groups []v1alpha1.ResourceGroup, x schema.GroupResource) bool {
	for _, g := range groups {
		for _, group := range g.APIGroups {
			for _, resource := range g.Resources {
				if Wide(schema.GroupResource{Group: group, Resource: resource}) &&
					(group == "*" || group == x.Group) && (resource == "*" || resource == x.Resource) {
					return true
				}
			}
		}
	}
	return false
}
