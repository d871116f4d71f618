package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// NewSpec returns the spec of a root with shards of one pod each. It has a canary if canary
// names namespaces.
func NewSpec(shards int32, onChange meshv1alpha1.OnChange, canary ...string) meshv1alpha1.ShardingConfigSpec {
	root := &meshv1alpha1.RootConfig{
		Auto:     &meshv1alpha1.AutoConfig{ShardingSize: shards, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
		OnChange: onChange,
	}
	if len(canary) > 0 {
		root.Canary = &meshv1alpha1.CanaryConfig{Replicas: new(int32(1)), InNamespaces: canary}
	}
	return meshv1alpha1.ShardingConfigSpec{Root: root}
}

// NewSubsets returns the spec of a root with a subset of one pod for each version. Each owns the
// tenants whose label [VersionLabel] names it.
func NewSubsets(onChange meshv1alpha1.OnChange, versions ...string) meshv1alpha1.ShardingConfigSpec {
	root := &meshv1alpha1.RootConfig{
		TargetSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": Name}},
		OnChange:       onChange,
	}
	for _, v := range versions {
		of := map[string]string{VersionLabel: v}
		root.Subsets = append(root.Subsets, meshv1alpha1.Subset{
			Name: v, PodLabels: of, Namespaces: []meshv1alpha1.NamespaceMatch{{Selector: &metav1.LabelSelector{MatchLabels: of}}},
		})
	}
	return meshv1alpha1.ShardingConfigSpec{Root: root}
}

// VersionLabel is the label of the pods of a subset, and of the tenants that it owns.
const VersionLabel = "tally.example.com/version"

// replicasOf returns how many pods of the first StatefulSet a root needs.
func replicasOf(root *meshv1alpha1.RootConfig) (n int32) {
	if root.Auto == nil {
		return 1
	}
	if root.Canary != nil {
		n += *root.Canary.Replicas
	}
	return n + root.Auto.ShardingSize*root.Auto.EveryShardReplicas
}

// shardsOf returns how many shards a root has.
func shardsOf(root *meshv1alpha1.RootConfig) int {
	if root.Auto == nil {
		return len(root.Subsets) + 1
	}
	n := int(root.Auto.ShardingSize)
	if root.Canary != nil {
		n++
	}
	return n
}

// WaitSettled waits until there is no handover and all shards have ready members.
func (o *Operator) WaitSettled(ctx context.Context) error {
	return kube.UntilWithin(ctx, SettleTimeout, "the shards to settle", o.Settled)
}

// Settled returns an error that says why the shards have not settled.
func (o *Operator) Settled(ctx context.Context) error {
	root, err := o.ShardingConfig(ctx)
	if err != nil {
		return err
	}
	if err := kube.Settled(root, shardsOf(root.Spec.Root)); err != nil {
		return err
	}
	if orphans, err := o.unowned(root.Status.Root); err != nil || len(orphans) > 0 {
		return errors.Join(err, fmt.Errorf("no shard owns %d tenants", len(orphans)))
	}
	var sets appsv1.StatefulSetList
	if err := o.List(ctx, &sets, client.InNamespace(o.Home)); err != nil {
		return fmt.Errorf("listing StatefulSets: %w", err)
	}
	for i := range sets.Items {
		if err := o.RolledOut(ctx, &sets.Items[i]); err != nil {
			return err
		}
	}
	return nil
}

// TenantsByShard returns the tenants that each shard owns.
func (o *Operator) TenantsByShard(s *meshv1alpha1.RootStatus) (map[string][]string, error) {
	out := map[string][]string{}
	for _, shard := range s.Shards {
		owned, err := sharding.Parse(shard.Held)
		if err != nil {
			return nil, fmt.Errorf("reading what %s holds: %w", shard.Name, err)
		}
		for _, t := range o.Tenants.Names {
			if owned.Owns(t) {
				out[shard.Name] = append(out[shard.Name], t)
			}
		}
	}
	return out, nil
}

// unowned returns the tenants that no shard with a ready member owns.
func (o *Operator) unowned(s *meshv1alpha1.RootStatus) ([]string, error) {
	tenants, err := o.TenantsByShard(s)
	if err != nil {
		return nil, err
	}
	var owned []string
	for _, shard := range s.Shards {
		if shard.ReadyMembers > 0 {
			owned = append(owned, tenants[shard.Name]...)
		}
	}
	return slices.DeleteFunc(slices.Clone(o.Tenants.Names), func(t string) bool { return slices.Contains(owned, t) }), nil
}
