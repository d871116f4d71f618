package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// divided is a root of some shards of one pod each, without a canary if that takes nothing.
func divided(shards int32, onChange meshv1alpha1.OnChange, canary ...string) meshv1alpha1.ShardingConfigSpec {
	root := &meshv1alpha1.RootConfig{
		Auto:     &meshv1alpha1.AutoConfig{ShardingSize: shards, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
		OnChange: onChange,
	}
	if len(canary) > 0 {
		root.Canary = &meshv1alpha1.CanaryConfig{Replicas: new(int32(1)), InNamespaces: canary}
	}
	return meshv1alpha1.ShardingConfigSpec{Root: root}
}

const firstTenant = "chaos-tenant-00"

// scale makes more shards and less, in great steps.
func scale(ctx context.Context, w *world, r *result) error {
	return w.withOperator(ctx, r, "scale", divided(1, meshv1alpha1.OnChangeRelist), func(ctx context.Context, o *operator) error {
		for _, n := range []int32{5, 2, 16, 3} {
			if err := o.change(ctx, func(s *meshv1alpha1.ShardingConfigSpec) { s.Root.Auto.ShardingSize = n }); err != nil {
				return err
			}
			if err := o.settled(ctx); err != nil {
				return fmt.Errorf("to %d shards: %w", n, err)
			}
			o.say("  %d shards", n)
		}
		return nil
	})
}

// canary has it take namespaces of every shard and give them back, again and again,
// by name, by bucket and by both.
func canary(ctx context.Context, w *world, r *result) error {
	return w.withOperator(ctx, r, "canary", divided(5, meshv1alpha1.OnChangeRelist, firstTenant), func(ctx context.Context, o *operator) error {
		for i := range 20 {
			if err := o.moveCanary(ctx, i); err != nil {
				return err
			}
			if err := o.settled(ctx); err != nil {
				return fmt.Errorf("move %d of the canary: %w", i+1, err)
			}
		}
		return nil
	})
}

// moveCanary gives it other namespaces than it has: of each of the other shards one.
// Each third time it is a bucket, and each fourth time some of both.
func (o *operator) moveCanary(ctx context.Context, turn int) error {
	var takes []string
	err := o.until(ctx, "the shards to be read", func(ctx context.Context) error {
		root, err := o.root(ctx)
		if err != nil {
			return err
		}
		holders, err := o.holders(root.Status.Root)
		if err != nil {
			return err
		}
		delete(holders, operatorName+"-0-canary")
		takes = nil
		for _, shard := range slices.Sorted(maps.Keys(holders)) {
			if names := holders[shard]; len(names) > 1 { // it is to keep some
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
	return o.change(ctx, func(s *meshv1alpha1.ShardingConfigSpec) {
		s.Root.Canary.InNamespaces, s.Root.Canary.InShardHash = takes, buckets
	})
}

// restart moves with members that are started anew for it.
func restart(ctx context.Context, w *world, r *result) error {
	return w.withOperator(ctx, r, "restart", divided(3, meshv1alpha1.OnChangeRestart, firstTenant), func(ctx context.Context, o *operator) error {
		for i := range 3 {
			if err := o.moveCanary(ctx, i); err != nil {
				return err
			}
			if err := o.settled(ctx); err != nil {
				return fmt.Errorf("move %d of the canary: %w", i+1, err)
			}
		}
		return nil
	})
}

// balance makes one shard heavy, and waits for the others to take of it.
func balance(ctx context.Context, w *world, r *result) error {
	spec := divided(4, meshv1alpha1.OnChangeRelist)
	spec.Root.Auto.Rebalance = meshv1alpha1.RebalanceAutomatic
	return w.withOperator(ctx, r, "balance", spec, func(ctx context.Context, o *operator) error {
		before, holders, err := o.skew(ctx)
		if err != nil {
			return err
		}
		r.sharding.skew = before
		heaviest := slices.Sorted(maps.Keys(holders))[0]
		for _, t := range holders[heaviest] {
			if err := o.makeTallies(ctx, t, 1); err != nil {
				return err
			}
		}
		uneven, _, err := o.skew(ctx)
		if err != nil {
			return err
		}
		// The manager counts what exists every some minutes, and at once when a manager begins to lead.
		if err := killManager(ctx, o, nil, &r.sharding); err != nil {
			return err
		}
		after := uneven
		ctx, cancel := context.WithTimeout(ctx, settling)
		defer cancel()
		err = kube.Until(ctx, "the shards to be balanced", func(ctx context.Context) error {
			now, _, err := o.skew(ctx)
			if err != nil {
				return err
			}
			if after = now; after > maxSkew {
				return fmt.Errorf("the heaviest is %.2f times the mean", after)
			}
			return o.settled(ctx)
		})
		r.sharding.skew = max(before, after)
		o.say("  the heaviest shard was %.2f times the mean, then %.2f, now %.2f", before, uneven, after)
		return err
	})
}

// skew counts the objects of each shard: the most over the mean.
func (o *operator) skew(ctx context.Context) (skew float64, holders map[string][]string, err error) {
	root, err := o.root(ctx)
	if err != nil {
		return 0, nil, err
	}
	if holders, err = o.holders(root.Status.Root); err != nil {
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
	for _, namespaces := range holders {
		n := 0
		for _, ns := range namespaces {
			n += in[ns]
		}
		most = max(most, n)
	}
	return float64(most) * float64(len(root.Status.Root.Shards)) / float64(len(list.Items)), holders, nil
}
