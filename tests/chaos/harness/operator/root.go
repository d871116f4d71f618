package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"

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

// replicasOf returns how many pods a root needs.
func replicasOf(root *meshv1alpha1.RootConfig) (n int32) {
	if root.Canary != nil {
		n += *root.Canary.Replicas
	}
	return n + root.Auto.ShardingSize*root.Auto.EveryShardReplicas
}

// shardsOf returns how many shards a root has.
func shardsOf(root *meshv1alpha1.RootConfig) int {
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
	return o.RolledOut(ctx, o.StatefulSet())
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
