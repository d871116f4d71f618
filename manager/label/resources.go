package label

import (
	"cmp"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Resolve returns the resources that groups list, as far as the apiserver serves them: namespaced
// ones that can be listed and patched, in their preferred versions. missing are those listed by
// full name that are not served so.
func Resolve(groups []v1alpha1.ResourceGroup, served []*metav1.APIResourceList) (found []schema.GroupVersionResource, missing []string) {
	available := labelled(served)
	wanted := map[schema.GroupVersionResource]bool{}
	for _, g := range groups {
		for gr, gvr := range available {
			if names(g.APIGroups, gr.Group) && names(g.Resources, gr.Resource) {
				wanted[gvr] = true
			}
		}
	}
	for _, gr := range Resources(groups) {
		if _, ok := available[gr]; !ok && gr.Group != "*" && gr.Resource != "*" {
			missing = append(missing, gr.String())
		}
	}
	// Events are served in two groups, and stored once.
	if legacy, ok := available[schema.GroupResource{Resource: "events"}]; ok && wanted[legacy] {
		delete(wanted, available[schema.GroupResource{Group: "events.k8s.io", Resource: "events"}])
	}
	for gvr := range wanted {
		found = append(found, gvr)
	}
	slices.SortFunc(found, func(a, b schema.GroupVersionResource) int { return byString(a.GroupResource(), b.GroupResource()) })
	slices.Sort(missing)
	return found, slices.Compact(missing)
}

func names(list []string, one string) bool {
	return slices.Contains(list, "*") || slices.Contains(list, one)
}

// labelled returns the served resources whose objects can be labelled.
func labelled(served []*metav1.APIResourceList) map[schema.GroupResource]schema.GroupVersionResource {
	out := map[schema.GroupResource]schema.GroupVersionResource{}
	for _, list := range served {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			continue
		}
		for _, r := range list.APIResources {
			if !r.Namespaced || !slices.Contains(r.Verbs, "list") || !slices.Contains(r.Verbs, "patch") {
				continue
			}
			gvr := schema.GroupVersionResource{Group: cmp.Or(r.Group, gv.Group), Version: cmp.Or(r.Version, gv.Version), Resource: r.Name}
			if _, ok := out[gvr.GroupResource()]; !ok {
				out[gvr.GroupResource()] = gvr
			}
		}
	}
	return out
}
