// Package acting separates what the shards of a root act by from what its spec says now.
//
// The locks, the divided resources, the method and the like must be the same for all shards,
// and agents apply policies one after the other. So a change of them takes effect only
// between two divisions: the shards release everything, all members are in standby, and only
// then is anything granted under the new spec. Until then policies follow from the part of
// the spec that is recorded in status.root.acting.
//
// It is pure.
package acting

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// Of returns the part of a root's spec that decides which pod may act on what.
func Of(spec *v1alpha1.ShardingConfigSpec) *v1alpha1.ActingSpec {
	spec = spec.DeepCopy()
	return &v1alpha1.ActingSpec{
		Controller: spec.Controller, DryRun: spec.DryRun, Limits: spec.Limits,
		ResourceSelector: spec.Root.ResourceSelector, Key: spec.Root.Key, Clusters: spec.Clusters, Method: spec.Root.Method, ClusterScoped: spec.Root.ClusterScoped,
		TargetStatefulSet: spec.Root.TargetStatefulSet, TargetRef: spec.Root.TargetRef, TargetSelector: spec.Root.TargetSelector,
	}
}

// KeyField is the path of the field that says what objects are assigned by.
const KeyField = "spec.root.key"

// Change is a change of a root's spec that its shards do not act by yet.
type Change struct {
	// To is what the spec asks for.
	To *v1alpha1.ActingSpec
	// Fields are the paths of the fields that differ.
	Fields []string
}

// Enact replaces, in roots among configs, what their shards do not act by yet. known returns
// the state of a root; not ok if it is not known. The configurations are replaced, not changed
// in place. The result has the changes that the shards do not act by, by the uid of the root.
func Enact(configs []*v1alpha1.ShardingConfig, known func(*v1alpha1.ShardingConfig) (compile.Root, bool)) map[types.UID]*Change {
	changes := map[types.UID]*Change{}
	for i, c := range configs {
		if c.Spec.Root == nil {
			continue
		}
		root, ok := known(c)
		if !ok || root.Acting == nil {
			continue
		}
		before := replaced(c, root.Acting)
		if fields := differ(before, c, root.Locks); len(fields) > 0 {
			changes[c.UID] = &Change{Of(&c.Spec), fields}
			configs[i] = before
		}
	}
	return changes
}

// replaced returns a configuration with another acting spec.
func replaced(c *v1alpha1.ShardingConfig, by *v1alpha1.ActingSpec) *v1alpha1.ShardingConfig {
	c, by = c.DeepCopy(), by.DeepCopy()
	c.Spec.Controller, c.Spec.DryRun, c.Spec.Limits, c.Spec.Clusters = by.Controller, by.DryRun, by.Limits, by.Clusters
	r := c.Spec.Root
	r.ResourceSelector, r.Key, r.Method, r.ClusterScoped = by.ResourceSelector, by.Key, by.Method, by.ClusterScoped
	r.TargetStatefulSet, r.TargetRef, r.TargetSelector = by.TargetStatefulSet, by.TargetRef, by.TargetSelector
	return c
}

// differ returns the paths of the fields by which shards that act by one of two specs may own
// an object that another shard owns by the other one. Selectors and namespaces in limits are
// not compared: all shards have the same, and what they own is disjoint within any of them.
// locks are those in the status: to name one that was discovered changes nothing.
func differ(a, b *v1alpha1.ShardingConfig, locks []v1alpha1.LockStatus) (fields []string) {
	ra, rb := a.Spec.Root, b.Spec.Root
	for _, f := range []struct {
		path  string
		equal bool
	}{
		{"spec.controller", slices.Equal(locksOf(a, locks), locksOf(b, locks))},
		{"spec.dryRun", a.Spec.DryRun == b.Spec.DryRun},
		{"spec.root.resourceSelector", slices.Equal(resources(a), resources(b))},
		{KeyField, cmp.Or(ra.Key, v1alpha1.KeyNamespace) == cmp.Or(rb.Key, v1alpha1.KeyNamespace)},
		{"spec.clusters", slices.Equal(a.Spec.Clusters, b.Spec.Clusters)},
		{"spec.root.method", cmp.Or(ra.Method, v1alpha1.MethodAuto) == cmp.Or(rb.Method, v1alpha1.MethodAuto)},
		{"spec.root.clusterScoped", cmp.Or(ra.ClusterScoped, v1alpha1.ClusterScopedEveryone) == cmp.Or(rb.ClusterScoped, v1alpha1.ClusterScopedEveryone)},
		{"spec.root.targetRef", layout.Target(ra) == layout.Target(rb)},
		{"spec.root.targetSelector", equality.Semantic.DeepEqual(ra.TargetSelector, rb.TargetSelector)},
	} {
		if !f.equal {
			fields = append(fields, f.path)
		}
	}
	return fields
}

// locksOf returns the operator's locks, sorted.
func locksOf(c *v1alpha1.ShardingConfig, known []v1alpha1.LockStatus) []types.NamespacedName {
	return slices.SortedFunc(slices.Values(compile.OperatorLocks(c, known)), func(a, b types.NamespacedName) int {
		return strings.Compare(a.String(), b.String())
	})
}

// resources returns the divided resources as they are named, sorted.
func resources(c *v1alpha1.ShardingConfig) []string {
	names := collect.Map(label.Resources(label.Divided(c)), schema.GroupResource.String)
	slices.Sort(names)
	return slices.Compact(names)
}
