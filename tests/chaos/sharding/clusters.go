package sharding

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	clustersSeed   = 17
	clustersFor    = 6 * time.Minute
	clustersShards = 3
	// cutOffEvery is the mean time between two members that are cut off, and cutOffFor how long one
	// is at most.
	cutOffEvery = 20 * time.Second
	cutOffFor   = 10 * time.Second
)

// tenure is a time in which one shard owns a member. Any of its pods may lead it.
type tenure struct {
	pods     []string
	from, to time.Time
}

// clusters moves the clusters that an operator manages from shard to shard, while some of them are
// cut off, and agents and managers are killed.
func (s *suite) clusters(ctx context.Context) error {
	home, err := s.CreateNamespace(ctx, "clusters")
	if err != nil {
		return err
	}
	c := &clusters{suite: s, tenures: map[string][]tenure{}}
	c.Site, err = fleet.Install(ctx, s.Cluster, home, fleet.Max, clustersShards)
	if err == nil {
		err = kube.InOrder(ctx, func(ctx context.Context) error { return c.settled(ctx, clustersShards) }, c.PermitToList, c.disturbed, c.judge)
	}
	return errors.Join(err, c.Remove(context.WithoutCancel(ctx)),
		client.IgnoreNotFound(s.Delete(context.WithoutCancel(ctx), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: home}})))
}

// clusters is the state of the part.
type clusters struct {
	*suite
	*fleet.Site
	tenures map[string][]tenure // by member
}

// disturbed moves members while the mesh and they are disturbed, and then once without.
func (c *clusters) disturbed(ctx context.Context) error {
	turn := 0
	err := beside(ctx, clustersFor, func(disturbing context.Context) error {
		for _, m := range c.Members {
			go m.Busy(disturbing)
		}
		for ; disturbing.Err() == nil; turn++ {
			if err := c.move(ctx, int32(1+turn%clustersShards)); err != nil {
				return err
			}
		}
		return nil
	}, c.cutOff, func(ctx context.Context) error {
		return disruptAll(ctx, clustersSeed, 20*time.Second, meshDisruptions(disruptAgentsEvery, killManagerEvery),
			[]*shardedOperator{{&operator.Operator{Operators: c.Operators, Part: "clusters"}, &c.counts}})
	})
	if err != nil {
		return err
	}
	c.Logf("  clusters: %d moves", turn)
	return c.move(ctx, clustersShards)
}

// cutOff cuts off a member from time to time.
func (c *clusters) cutOff(ctx context.Context) error {
	random := rand.New(rand.NewPCG(clustersSeed, 1))
	for kube.Sleep(ctx, time.Duration(random.Int64N(int64(2*cutOffEvery)))) == nil {
		m := c.Members[random.IntN(len(c.Members))]
		undisturbed := context.WithoutCancel(ctx)
		if err := m.Stop(undisturbed); err != nil {
			return err
		}
		took := time.Duration(random.Int64N(int64(cutOffFor)))
		_ = kube.Sleep(ctx, took)
		if err := m.Start(undisturbed); err != nil {
			return err
		}
		c.counts.cutOff++
		c.Logf("  clusters: %s was cut off for %v", m.Name, took.Round(time.Millisecond))
	}
	return nil
}

// move divides the members among so many shards, and has something done in each. The shard of the pod
// that did it owns the member from when all had settled until the next move.
func (c *clusters) move(ctx context.Context, shards int32) error {
	now := time.Now()
	for name, all := range c.tenures {
		if last := &all[len(all)-1]; last.to.IsZero() {
			last.to = now
		}
		c.tenures[name] = all
	}
	root := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: c.Home, Name: fleet.RootName}}
	err := c.Until(ctx, "the root to be changed", func(ctx context.Context) error {
		if err := c.Get(ctx, client.ObjectKeyFromObject(root), root); err != nil {
			return err
		}
		root.Spec.Root.Auto.ShardingSize = shards
		return c.Update(ctx, root)
	})
	if err != nil {
		return err
	}
	if err := c.settled(ctx, int(shards)); err != nil {
		return err
	}
	from := time.Now()
	pods := &corev1.PodList{}
	if err := c.List(ctx, pods, client.InNamespace(c.Home), client.HasLabels{meshv1alpha1.ShardLabel}); err != nil {
		return err
	}
	for _, m := range c.Members {
		by, err := m.Work(ctx)
		if err != nil {
			return err
		}
		c.tenures[m.Name] = append(c.tenures[m.Name], tenure{pods: besides(pods.Items, by), from: from})
	}
	return nil
}

// besides returns the names of the pods that are in the shard of one of them.
func besides(pods []corev1.Pod, name string) (out []string) {
	i := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.Name == name })
	if i < 0 {
		return nil
	}
	for _, p := range pods {
		if p.Labels[meshv1alpha1.ShardLabel] == pods[i].Labels[meshv1alpha1.ShardLabel] {
			out = append(out, p.Name)
		}
	}
	return out
}

// settled waits until a number of shards have settled.
func (c *clusters) settled(ctx context.Context, shards int) error {
	return kube.UntilWithin(ctx, operator.SettleTimeout, "the clusters' shards", func(ctx context.Context) error {
		root := &meshv1alpha1.ShardingConfig{}
		if err := c.Get(ctx, client.ObjectKey{Namespace: c.Home, Name: fleet.RootName}, root); err != nil {
			return err
		}
		return kube.Settled(root, shards)
	})
}

// judge counts the writes in members of pods that did not own them, by the members' audit logs. In a
// handover the last owner writes first, and then the next one.
func (c *clusters) judge(context.Context) error {
	for _, m := range c.Members {
		writes, err := m.Writes()
		if err != nil {
			return err
		}
		if len(writes) == 0 {
			return fmt.Errorf("%s: nothing was written", m.Name)
		}
		c.counts.clusterWrites += len(writes)
		for _, w := range foreign(writes, c.tenures[m.Name]) {
			c.counts.clusterDoubles++
			c.Logf("  ! %s: %s wrote at %s", m.Name, w.Pod, w.At.Format(time.StampMilli))
		}
	}
	return nil
}

// foreign returns the writes, which are in order, of pods that did not own a member. tenures are in
// order, too. Before the first one any pod may own it.
func foreign(writes []fleet.Write, tenures []tenure) (out []fleet.Write) {
	i, next := -1, false // the last tenure that has begun, and whether the next owner has written since it ended
	for _, w := range writes {
		for i+1 < len(tenures) && !w.At.Before(tenures[i+1].from) {
			i, next = i+1, false
		}
		if i < 0 {
			continue
		}
		owns := slices.Contains(tenures[i].pods, w.Pod)
		if !tenures[i].to.IsZero() && w.At.After(tenures[i].to) && i+1 < len(tenures) { // a handover
			willOwn := slices.Contains(tenures[i+1].pods, w.Pod)
			next = next || willOwn && !owns
			owns = owns && !next || willOwn
		}
		if !owns {
			out = append(out, w)
		}
	}
	return out
}
