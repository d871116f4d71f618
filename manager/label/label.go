// Package label gives the objects that configurations divide the labels that
// they are divided by.
//
// New and changed objects are stamped at admission: by a MutatingAdmissionPolicy, which copies the
// bucket from the label of the namespace, or by a webhook where the cluster has no such policy. The
// Sweeper finds existing objects, and those that admission missed: it lists metadata of objects
// without the labels. Nothing is watched.
package label

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// Configuration is the name of the MutatingWebhookConfiguration for stamping, and of the
// MutatingAdmissionPolicy and its binding.
const Configuration = "ctrlmesh-stamp"

// Of returns the labels of the objects of a namespace.
func Of(namespace string) map[string]string {
	return map[string]string{
		v1alpha1.NamespaceLabel:    namespace,
		v1alpha1.ShardingHashLabel: sharding.BucketLabel(namespace),
		v1alpha1.ControlLabel:      "true",
	}
}

// Listed returns the resources whose objects must be labelled, each group once: those of
// configurations that divide them by labels, or select them by labels of the mesh.
func Listed(configs ...*v1alpha1.ShardingConfig) []v1alpha1.ResourceGroup {
	seen := map[string]v1alpha1.ResourceGroup{}
	for _, c := range configs {
		for _, l := range Limits(c) {
			if !byLabels(c) && !Needed(c, l) {
				continue
			}
			for _, g := range l.RelateResources {
				g = v1alpha1.ResourceGroup{APIGroups: canonical(g.APIGroups), Resources: canonical(g.Resources)}
				seen[fmt.Sprint(g)] = g
			}
		}
	}
	return collect.Map(slices.Sorted(maps.Keys(seen)), func(k string) v1alpha1.ResourceGroup { return seen[k] })
}

func byLabels(c *v1alpha1.ShardingConfig) bool {
	if c.Labels[v1alpha1.RootLabel] != "" {
		return false // its root counts
	}
	return c.Spec.Root == nil || c.Spec.Root.Method == v1alpha1.MethodLabels
}

// Needed reports whether a limit of a configuration works only on objects that are
// stamped: those of a root that divides by labels do, and others if their selector has a
// label of the mesh.
func Needed(c *v1alpha1.ShardingConfig, l v1alpha1.ObjectLimiter) bool {
	switch {
	case c.Labels[v1alpha1.RootLabel] != "":
		return false // its root counts
	case c.Spec.Root != nil && byLabels(c):
		return true
	case l.Selector == nil:
		return false
	}
	return collect.Any(Of(""), func(key, _ string) bool {
		_, ok := l.Selector.MatchLabels[key]
		return ok || slices.ContainsFunc(l.Selector.MatchExpressions, func(r metav1.LabelSelectorRequirement) bool { return r.Key == key })
	})
}

// Permitted omits the resources that the administrator excludes from stamping. It keeps the
// group "*" for resources that are excluded in some groups; callers of Resolve omit those.
func Permitted(groups []v1alpha1.ResourceGroup, s *platform.Settings) (out []v1alpha1.ResourceGroup) {
	for _, g := range groups {
		for _, group := range g.APIGroups {
			resources := slices.DeleteFunc(slices.Clone(g.Resources), func(r string) bool {
				return !s.Stamps(schema.GroupResource{Group: group, Resource: r})
			})
			if len(resources) > 0 {
				out = append(out, v1alpha1.ResourceGroup{APIGroups: []string{group}, Resources: resources})
			}
		}
	}
	return out
}

// Divided returns the resources that a configuration divides.
func Divided(c *v1alpha1.ShardingConfig) (out []v1alpha1.ResourceGroup) {
	for _, l := range Limits(c) {
		out = append(out, l.RelateResources...)
	}
	return out
}

// Limits returns the limits of a configuration, or of the shards that it derives.
func Limits(c *v1alpha1.ShardingConfig) []v1alpha1.ObjectLimiter {
	if c.Spec.Root == nil {
		return c.Spec.Limits
	}
	return slices.Concat(c.Spec.Root.ResourceSelector, c.Spec.Limits)
}

// Resources returns the resources that groups name.
func Resources(groups []v1alpha1.ResourceGroup) (out []schema.GroupResource) {
	for _, g := range groups {
		for _, group := range g.APIGroups {
			for _, r := range g.Resources {
				out = append(out, schema.GroupResource{Group: group, Resource: r})
			}
		}
	}
	return out
}

// Wild reports whether groups name resources by "*", so that they follow from what is served.
func Wild(groups []v1alpha1.ResourceGroup) bool {
	return slices.ContainsFunc(Resources(groups), func(gr schema.GroupResource) bool { return gr.Group == "*" || gr.Resource == "*" })
}

// Stamped returns the resources that groups name and the administrator does not exclude, sorted.
// "*" stands for what is served.
func Stamped(groups []v1alpha1.ResourceGroup, served []*metav1.APIResourceList, s *platform.Settings) []schema.GroupResource {
	available, wanted := labelled(served), map[schema.GroupResource]bool{}
	for _, gr := range Resources(groups) {
		if gr.Group != "*" && gr.Resource != "*" {
			wanted[gr] = true
		}
		for a := range available {
			if names([]string{gr.Group}, a.Group) && names([]string{gr.Resource}, a.Resource) {
				wanted[a] = true
			}
		}
	}
	maps.DeleteFunc(wanted, func(gr schema.GroupResource, _ bool) bool { return !s.Stamps(gr) })
	return slices.SortedFunc(maps.Keys(wanted), func(a, b schema.GroupResource) int { return cmp.Compare(a.String(), b.String()) })
}

// Served returns the resources whose objects can be labelled, as far as the apiserver serves them.
func Served(resources []schema.GroupResource, served []*metav1.APIResourceList) []schema.GroupResource {
	available := labelled(served)
	return collect.Filter(resources, func(gr schema.GroupResource) bool { _, ok := available[gr]; return ok })
}

func canonical(names []string) []string {
	if slices.Contains(names, "*") {
		return []string{"*"}
	}
	return slices.Compact(slices.Sorted(slices.Values(names)))
}

// Resolve returns the resources that groups list, as far as the apiserver serves them: namespaced
// ones that can be listed and patched, in their preferred versions. missing are those listed by
// full name that are not served so.
func Resolve(groups []v1alpha1.ResourceGroup, served []*metav1.APIResourceList) (found []schema.GroupVersionResource, missing []string) {
	return resolve(groups, labelled(served))
}

// Listable is Resolve for resources whose objects are not labelled: of objects in no namespace, too.
func Listable(groups []v1alpha1.ResourceGroup, served []*metav1.APIResourceList) []schema.GroupVersionResource {
	found, _ := resolve(groups, known(served, func(r metav1.APIResource) bool { return slices.Contains(r.Verbs, "list") }))
	return found
}

func resolve(groups []v1alpha1.ResourceGroup, available map[schema.GroupResource]schema.GroupVersionResource) (found []schema.GroupVersionResource, missing []string) {
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
	found = slices.SortedFunc(maps.Keys(wanted), func(a, b schema.GroupVersionResource) int {
		return cmp.Compare(a.GroupResource().String(), b.GroupResource().String())
	})
	slices.Sort(missing)
	return found, slices.Compact(missing)
}

func names(list []string, one string) bool {
	return slices.Contains(list, "*") || slices.Contains(list, one)
}

// labelled returns the served resources whose objects can be labelled.
func labelled(served []*metav1.APIResourceList) map[schema.GroupResource]schema.GroupVersionResource {
	return known(served, func(r metav1.APIResource) bool {
		return r.Namespaced && slices.Contains(r.Verbs, "list") && slices.Contains(r.Verbs, "patch")
	})
}

// known returns the resources of which is is true, each in the version that comes first.
func known(served []*metav1.APIResourceList, is func(metav1.APIResource) bool) map[schema.GroupResource]schema.GroupVersionResource {
	out := map[schema.GroupResource]schema.GroupVersionResource{}
	for _, list := range served {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			continue
		}
		for _, r := range list.APIResources {
			if !is(r) {
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
