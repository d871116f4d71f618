package decide

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// children returns the objects of the shards of a root, sorted by name.
func children(root *v1alpha1.ShardingConfig, state handover.State) []*v1alpha1.ShardingConfig {
	if root.DeletionTimestamp != nil && !state.Holds() {
		return nil // the garbage collector may be slow, or off
	}
	return collect.Map(slices.Sorted(maps.Keys(state.Shards)), func(name string) *v1alpha1.ShardingConfig { return Child(root, name) })
}

// Child returns the object of a shard.
func Child(root *v1alpha1.ShardingConfig, shard string) *v1alpha1.ShardingConfig {
	spec := root.Spec.DeepCopy()
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       root.Namespace,
			Name:            shard,
			Labels:          map[string]string{v1alpha1.RootLabel: root.Name},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(root, origin.KindOf(root))},
		},
		Spec: v1alpha1.ShardingConfigSpec{
			Selector:           &metav1.LabelSelector{MatchLabels: map[string]string{v1alpha1.ShardLabel: shard}},
			Controller:         spec.Controller,
			Webhook:            spec.Webhook,
			Limits:             collect.Map(slices.Concat(spec.Root.ResourceSelector, spec.Limits), layout.Written),
			FailurePolicy:      spec.FailurePolicy,
			TokenBinding:       spec.TokenBinding,
			ClientCertificates: spec.ClientCertificates,
			Isolation:          spec.Isolation,
			Reads:              spec.Reads,
			Fence:              spec.Fence,
		},
	}
}

// releases reports whether the finalizer of a root that is being deleted must be removed: no
// pod acts on its shards or leads under their locks, and all pods that cannot run unsharded
// are replaced.
func (d *deciding) releases() bool {
	v, state := d.v, d.next
	if v.Spec.Config.DeletionTimestamp == nil || state.Holds() || !v.quiet(state.Members) || v.unreleased() || len(v.misfits(state.Members)) > 0 {
		return false
	}
	return !collect.Any(state.Members, func(_ string, m handover.Member) bool { return v.exists(m) })
}
