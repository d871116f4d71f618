package sharding

import (
	"context"
	"fmt"
	"maps"
	"slices"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// balance adds objects to one shard, and waits until the shards are balanced again.
func (s *suite) balance(ctx context.Context) error {
	spec := operator.NewSpec(4, meshv1alpha1.OnChangeRelist)
	spec.Root.Auto.Rebalance = meshv1alpha1.RebalanceAutomatic
	return s.run(ctx, "balance", spec, func(ctx context.Context, o *shardedOperator) error {
		before, tenants, err := o.skew(ctx)
		if err != nil {
			return err
		}
		s.counts.skew = before
		heaviest := slices.Sorted(maps.Keys(tenants))[0]
		for _, t := range tenants[heaviest] {
			if err := o.Tenants.AddObjects(ctx, t, 1); err != nil {
				return err
			}
		}
		uneven, _, err := o.skew(ctx)
		if err != nil {
			return err
		}
		// A manager counts the objects every few minutes, and when it begins to lead.
		if err := killManager(ctx, o, nil); err != nil {
			return err
		}
		after := uneven
		err = kube.UntilWithin(ctx, operator.SettleTimeout, "the shards to be balanced", func(ctx context.Context) error {
			now, _, err := o.skew(ctx)
			if err != nil {
				return err
			}
			if after = now; after > maxSkew {
				return fmt.Errorf("the heaviest is %.2f times the mean", after)
			}
			return o.WaitSettled(ctx)
		})
		s.counts.skew = max(before, after)
		o.Logf("  the heaviest shard was %.2f times the mean, then %.2f, now %.2f", before, uneven, after)
		return err
	})
}

// skew returns the largest number of objects of a shard over the mean, and the tenants of each
// shard.
func (o *shardedOperator) skew(ctx context.Context) (skew float64, tenants map[string][]string, err error) {
	root, err := o.ShardingConfig(ctx)
	if err != nil {
		return 0, nil, err
	}
	if tenants, err = o.TenantsByShard(root.Status.Root); err != nil {
		return 0, nil, err
	}
	var list tallyv1.TallyList
	if err := o.List(ctx, &list); err != nil {
		return 0, nil, fmt.Errorf("listing objects: %w", err)
	}
	in := map[string]int{}
	for _, t := range list.Items {
		in[t.Namespace]++
	}
	most := 0
	for _, namespaces := range tenants {
		n := 0
		for _, ns := range namespaces {
			n += in[ns]
		}
		most = max(most, n)
	}
	return float64(most) * float64(len(root.Status.Root.Shards)) / float64(len(list.Items)), tenants, nil
}
