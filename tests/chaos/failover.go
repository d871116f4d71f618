package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

const wantFailovers = 6

// failover kills the leaders of shards that have another member, and counts the time
// until somebody leads again: the other, or the next process.
func failover(ctx context.Context, w *world, r *result) error {
	spec := divided(2, meshv1alpha1.OnChangeRelist)
	spec.Root.Auto.EveryShardReplicas = 2
	return w.withOperator(ctx, r, "failover", spec, func(ctx context.Context, o *operator) error {
		root, err := o.root(ctx)
		if err != nil {
			return err
		}
		for i := range wantFailovers {
			shard := root.Status.Root.Shards[i%len(root.Status.Root.Shards)].Name
			took, err := o.failOver(ctx, shard)
			if err != nil {
				return fmt.Errorf("failover of %s: %w", shard, err)
			}
			r.sharding.failovers = append(r.sharding.failovers, took)
			o.say("  %s has a leader after %v", shard, took.Round(10*time.Millisecond))
			if err := o.settled(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// failOver kills the leader of a shard.
func (o *operator) failOver(ctx context.Context, shard string) (time.Duration, error) {
	holder, err := o.leader(ctx, shard, "")
	if err != nil {
		return 0, err
	}
	pods, err := o.pods(ctx)
	if err != nil {
		return 0, err
	}
	for i := range pods {
		if !strings.HasPrefix(holder, pods[i].Name+"_") {
			continue
		}
		killed, err := o.killProcess(ctx, &pods[i], operatorName)
		if err != nil {
			return 0, err
		}
		_, err = o.leader(ctx, shard, holder)
		return time.Since(killed), err
	}
	return 0, fmt.Errorf("%s holds the lock, and there is no such pod", holder)
}

// leader waits until somebody holds the lock of a shard, but for one.
func (o *operator) leader(ctx context.Context, shard, but string) (holder string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond) // what is measured must not depend on how it is waited for
	defer tick.Stop()
	for {
		var lease coordinationv1.Lease
		err = o.Get(ctx, client.ObjectKey{Namespace: o.home, Name: operatorLock + "---" + shard}, &lease)
		if err == nil && lease.Spec.HolderIdentity != nil {
			if holder = *lease.Spec.HolderIdentity; holder != "" && holder != but {
				return holder, nil
			}
			err = errors.New(holder + " holds it")
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("waiting for a leader of %s: %w", shard, err)
		case <-tick.C:
		}
	}
}
