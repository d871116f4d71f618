package sharding

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	wantFailovers = 6
	// knowing is the age at which an agent has seen all requests in flight. The agents may be new.
	knowing = 40 * time.Second
)

// failover kills the leaders of shards with two members, and measures the time until another
// process leads: the other member or a restarted one. The container runtime reports pods to the
// agents at first, and does not later.
func (s *suite) failover(ctx context.Context) error {
	spec := operator.NewSpec(2, meshv1alpha1.OnChangeRelist)
	spec.Root.Auto.EveryShardReplicas = 2
	return s.run(ctx, "failover", spec, func(ctx context.Context, o *shardedOperator) error {
		return kube.InOrder(ctx, o.failOvers, func(ctx context.Context) error {
			return s.WithAgentArgs(ctx, []string{"--nri-socket=/run/ctrlmesh/none.sock"}, func(ctx context.Context) error {
				o.Logf("  without NRI:")
				return o.failOvers(ctx)
			})
		})
	})
}

func (o *shardedOperator) failOvers(ctx context.Context) error {
	if err := kube.Sleep(ctx, knowing); err != nil { // younger agents report no exits
		return err
	}
	root, err := o.ShardingConfig(ctx)
	if err != nil {
		return err
	}
	for i := range wantFailovers {
		shard := root.Status.Root.Shards[i%len(root.Status.Root.Shards)].Name
		took, err := o.failOver(ctx, shard)
		if err != nil {
			return fmt.Errorf("failover of %s: %w", shard, err)
		}
		o.counts.failovers = append(o.counts.failovers, took)
		o.Logf("  %s has a leader after %v", shard, took.Round(10*time.Millisecond))
		if err := o.WaitSettled(ctx); err != nil {
			return err
		}
	}
	return nil
}

// failOver kills the leader of a shard, and returns how long the shard had none.
func (o *shardedOperator) failOver(ctx context.Context, shard string) (time.Duration, error) {
	holder, err := o.leader(ctx, shard, "")
	if err != nil {
		return 0, err
	}
	pods, err := o.Pods(ctx)
	if err != nil {
		return 0, err
	}
	for i := range pods {
		if !strings.HasPrefix(holder, pods[i].Name+"_") {
			continue
		}
		killed, err := o.KillProcess(ctx, &pods[i], operator.Name)
		if err != nil {
			return 0, err
		}
		_, err = o.leader(ctx, shard, holder)
		return time.Since(killed), err
	}
	return 0, fmt.Errorf("%s holds the lock, and there is no such pod", holder)
}

// leader waits until a process other than except holds the lock of a shard, and returns it.
func (o *shardedOperator) leader(ctx context.Context, shard, except string) (holder string, err error) {
	ctx, cancel := context.WithTimeout(ctx, harness.Timeout)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond) // finer than what is measured
	defer tick.Stop()
	for {
		var lease coordinationv1.Lease
		err = o.Get(ctx, client.ObjectKey{Namespace: o.Home, Name: operator.Lock + "---" + shard}, &lease)
		if err == nil && lease.Spec.HolderIdentity != nil {
			if holder = *lease.Spec.HolderIdentity; holder != "" && holder != except {
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
