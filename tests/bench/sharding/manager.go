package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

const (
	tenants      = 1000
	tenantShards = 5
	tenantHome   = "bench-tenants"

	fillFor    = 5 * time.Minute // objects not created by then are omitted
	balanceFor = 4 * time.Minute
)

// crowd is the measurement of the manager with a number of sharded objects.
type crowd struct {
	objects     int64   // by the manager's count
	first, skew float64 // heaviest shard over the mean, once they had been counted and after balancing
	live        float64 // bytes of its heap
}

// manager measures the manager's memory with few and with many sharded objects, and how
// evenly a root divides them. The shards are first cut when there are few, and then balanced
// when some of the namespaces have many more.
func (b *bench) manager(ctx context.Context) ([]string, error) {
	before := stats.Load()
	namespaces, err := b.makeNamespaces(ctx, "tenant-%04d", tenants)
	if err != nil {
		return nil, err
	}
	few, err := b.fill(ctx, namespaces, b.few)
	if err != nil {
		return nil, err
	}
	if err := b.divide(ctx); err != nil {
		return nil, err
	}
	first, err := b.look(ctx, few)
	if err != nil {
		return nil, err
	}
	more, err := b.fill(ctx, namespaces[tenants/4:], b.many-b.few)
	if err != nil {
		return nil, err
	}
	last, err := b.look(ctx, few+more)
	if err != nil {
		return nil, err
	}
	return reportManager(first, last, before), nil
}

// fill creates about n ConfigMaps: the number in a namespace is proportional to one over the
// square root of its rank. It returns how many it created in time.
func (b *bench) fill(ctx context.Context, namespaces []string, n int) (made int64, err error) {
	progress("making %d objects", n)
	sum := 0.0
	for rank := range namespaces {
		sum += 1 / math.Sqrt(float64(rank+1))
	}
	begin := time.Now()
	var count atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(creators)
	for i, ns := range namespaces {
		rank := i * 617 % len(namespaces) // similar names do not have similar ranks
		for range int(math.Ceil(float64(n) / sum / math.Sqrt(float64(rank+1)))) {
			group.Go(func() error {
				if time.Since(begin) > fillFor {
					return nil
				}
				count.Add(1)
				return b.CreateAll(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, GenerateName: "c-"}})
			})
		}
	}
	err = group.Wait()
	return count.Load(), err
}

// divide creates a root of the ConfigMaps, and members that do nothing.
func (b *bench) divide(ctx context.Context) error {
	home := metav1.ObjectMeta{Namespace: tenantHome, Name: operatorName}
	root := &meshv1alpha1.ShardingConfig{ObjectMeta: home, Spec: meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		Prefix: operatorName, TargetStatefulSet: operatorName, OnChange: meshv1alpha1.OnChangeRelist,
		Auto: &meshv1alpha1.AutoConfig{ShardingSize: tenantShards, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceAutomatic},
		ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{
			{APIGroups: []string{""}, Resources: []string{"configmaps"}}}}},
	}}}
	labels := map[string]string{"app": operatorName, meshv1alpha1.EnableProxyLabel: "true"}
	set := &appsv1.StatefulSet{ObjectMeta: home, Spec: appsv1.StatefulSetSpec{
		Replicas: new(int32(tenantShards)), PodManagementPolicy: appsv1.ParallelPodManagement,
		Selector: &metav1.LabelSelector{MatchLabels: operatorLabels},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{
				Name: "idle", Image: "localhost/pause:1", ImagePullPolicy: corev1.PullNever}}},
		},
	}}
	if err := b.CreateAll(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenantHome}}, root); err != nil {
		return err
	}
	if err := b.observed(ctx, tenantHome); err != nil {
		return err
	}
	return b.CreateAll(ctx, set)
}

// restartManager restarts all replicas.
func (b *bench) restartManager(ctx context.Context) error {
	progress("restarting the manager")
	if _, err := b.Kubectl(ctx, "-n", kube.SystemNamespace, "rollout", "restart", "deployment/"+kube.ManagerName); err != nil {
		return err
	}
	return until(ctx, "the manager's roll-out", func(ctx context.Context) error {
		return b.RolledOut(ctx, kube.Manager())
	})
}

// look waits until the manager has counted the objects, and some time until it has balanced
// them. The manager was restarted: it counts at once, and has done nothing else.
func (b *bench) look(ctx context.Context, objects int64) (c crowd, err error) {
	if err := b.restartManager(ctx); err != nil {
		return c, err
	}
	read := func(ctx context.Context) error {
		root, err := b.settled(ctx, tenantHome, tenantShards)
		if err != nil {
			return err
		}
		c.objects = 0
		for _, s := range root.Status.Root.Shards {
			c.objects += s.Weight
		}
		if c.objects < objects {
			return fmt.Errorf("it has counted %d of %d", c.objects, objects)
		}
		c.skew, err = strconv.ParseFloat(root.Status.Root.Skew, 64)
		return err
	}
	progress("waiting for the manager to have counted them")
	if err := until(ctx, "the manager to have counted the objects", read); err != nil {
		return c, err
	}
	c.first = c.skew
	_ = kube.UntilWithin(ctx, balanceFor, "balance", func(ctx context.Context) error { // if there is none, the skew shows it
		if err := read(ctx); err != nil {
			return err
		}
		if c.skew > mostSkew {
			return errors.New("not balanced")
		}
		return nil
	})
	var pods corev1.PodList
	if err := b.List(ctx, &pods, client.InNamespace(kube.SystemNamespace), managerLabels); err != nil {
		return c, err
	}
	for _, pod := range pods.Items {
		live, err := b.live(ctx, pod.Namespace, pod.Name)
		if err != nil {
			return c, err
		}
		c.live = max(c.live, live) // the leader's
	}
	return c, nil
}
