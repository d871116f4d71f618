package sharding

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
)

// scale adds and removes shards in large steps.
func (s *suite) scale(ctx context.Context) error {
	return s.run(ctx, "scale", operator.NewSpec(1, meshv1alpha1.OnChangeRelist), func(ctx context.Context, o *shardedOperator) error {
		for _, n := range []int32{5, 2, 16, 3} {
			if err := o.Change(ctx, func(s *meshv1alpha1.ShardingConfigSpec) { s.Root.Auto.ShardingSize = n }); err != nil {
				return err
			}
			if err := o.WaitSettled(ctx); err != nil {
				return fmt.Errorf("to %d shards: %w", n, err)
			}
			o.Logf("  %d shards", n)
		}
		return nil
	})
}

// canary moves namespaces of every shard to the canary and back, again and again, by name, by
// bucket and by both.
func (s *suite) canary(ctx context.Context) error {
	spec := operator.NewSpec(5, meshv1alpha1.OnChangeRelist, operator.FirstTenant)
	return s.run(ctx, "canary", spec, func(ctx context.Context, o *shardedOperator) error { return o.moveTimes(ctx, 20) })
}

// restart moves keys between members that are restarted for each move.
func (s *suite) restart(ctx context.Context) error {
	spec := operator.NewSpec(3, meshv1alpha1.OnChangeRestart, operator.FirstTenant)
	return s.run(ctx, "restart", spec, func(ctx context.Context, o *shardedOperator) error { return o.moveTimes(ctx, 3) })
}

// moveTimes moves the canary n times. Each move must settle.
func (o *shardedOperator) moveTimes(ctx context.Context, n int) error {
	for i := range n {
		if err := o.moveCanary(ctx, i); err != nil {
			return err
		}
		if err := o.WaitSettled(ctx); err != nil {
			return fmt.Errorf("move %d of the canary: %w", i+1, err)
		}
	}
	return nil
}

// moveCanary gives the canary other namespaces than it has: one of each other shard. Every
// third turn it gives a bucket instead, and in some of the others a bucket, too.
func (o *shardedOperator) moveCanary(ctx context.Context, turn int) error {
	var takes []string
	err := o.Until(ctx, "the shards to be read", func(ctx context.Context) error {
		root, err := o.ShardingConfig(ctx)
		if err != nil {
			return err
		}
		tenants, err := o.TenantsByShard(root.Status.Root)
		if err != nil {
			return err
		}
		delete(tenants, operator.Name+"-0-canary")
		takes = nil
		for _, shard := range slices.Sorted(maps.Keys(tenants)) {
			if names := tenants[shard]; len(names) > 1 { // it keeps at least one
				takes = append(takes, names[turn%len(names)])
			}
		}
		if len(takes) == 0 {
			return errors.New("no shard has two namespaces")
		}
		return nil
	})
	if err != nil {
		return err
	}
	buckets := []string{strconv.Itoa(turn % 32)}
	switch {
	case turn%3 == 2:
		takes = nil
	case turn%4 != 3:
		buckets = nil
	}
	return o.Change(ctx, func(s *meshv1alpha1.ShardingConfigSpec) {
		s.Root.Canary.InNamespaces, s.Root.Canary.InShardHash = takes, buckets
	})
}
