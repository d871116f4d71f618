package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// TestResize changes one shard into three, and into two; a canary keeps its namespaces. The
// informers of members that lose namespaces list again; the members are not restarted.
func TestResize(t *testing.T) {
	t.Parallel()
	tenants := newTenants(t, 8)
	tenants.fill(t, "cm")
	named, bucket := tenants[0], sharding.BucketLabel(tenants[1])
	canary := slices.DeleteFunc(slices.Clone(tenants), func(ns string) bool { return ns != named && sharding.BucketLabel(ns) != bucket })
	r := newRoot(t, "e2e-resize", 2, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		Prefix:            "resized", // the label of a namespace in pins concerns all roots with such a shard
		TargetStatefulSet: workload,
		OnChange:          meshv1alpha1.OnChangeRelist,
		Canary:            &meshv1alpha1.CanaryConfig{Replicas: new(int32(1)), InNamespaces: []string{named}, InShardHash: []string{bucket}},
		Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 1, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
	}})
	r.settles(t, 2)
	pods := r.pods(t, 2)
	var stores []cache.Store
	for _, pod := range pods {
		stores = append(stores, storeIn(t, pod, tenants.selector()))
	}
	lists := func(pod *corev1.Pod) []string { return tenants.listed(t, pod) }
	for _, size := range []int32{1, 3, 2} {
		workloads := cluster.Clientset.AppsV1().StatefulSets(r.home)
		scale, err := workloads.GetScale(t.Context(), workload, metav1.GetOptions{})
		require.NoError(t, err)
		scale.Spec.Replicas = size + 1
		_, err = workloads.UpdateScale(t.Context(), workload, scale, metav1.UpdateOptions{})
		require.NoError(t, err)
		r.scale(t, size, size+1)

		owner := tenants.divided(t, 1, r.pods(t, int(size)+1), lists)
		for _, ns := range tenants {
			require.Equal(t, slices.Contains(canary, ns), owner[ns] == pods[0].Name, "%s is of %s", ns, owner[ns])
		}
		for i, store := range stores {
			has(t, "the informer of "+pods[i].Name, store, lists(pods[i]))
		}
	}
	r.pins(t, tenants)
	for i, pod := range r.pods(t, len(pods)) {
		require.Equal(t, pods[i].UID, pod.UID, "it was evicted")
	}
}

// pins labels a namespace with the shard that is to own it, and removes the label again.
func (r root) pins(t *testing.T, tenants tenants) {
	t.Helper()
	pods := r.pods(t, 3) // of the canary, and of two shards
	lists := func(pod *corev1.Pod) []string { return tenants.listed(t, pod) }
	before := tenants.divided(t, 1, pods, lists)
	// By their names, one of the two shards may own all that are not of the canary.
	i := slices.IndexFunc(tenants, func(ns string) bool { return before[ns] != pods[0].Name })
	require.GreaterOrEqual(t, i, 0)
	from, to, shard := pods[1], pods[2], "resized-2-normal"
	if before[tenants[i]] == to.Name {
		from, to, shard = to, from, "resized-1-normal"
	}
	owned := func(by *corev1.Pod) {
		t.Helper()
		until(t, tenants[i]+" to be of "+by.Name, func(context.Context) error {
			if !slices.Contains(lists(by), tenants[i]+"/cm") {
				return fmt.Errorf("it is not: %+v", r.config(t).Status.Root)
			}
			return nil
		})
	}
	labelNamespace(t, tenants[i], meshv1alpha1.OwnerShardLabel, shard)
	owned(to)
	want := maps.Clone(before)
	want[tenants[i]] = to.Name
	require.Equal(t, want, tenants.divided(t, 1, pods, lists), "others moved, too")
	labelNamespace(t, tenants[i], meshv1alpha1.OwnerShardLabel, "")
	owned(from)
	require.Equal(t, before, tenants.divided(t, 1, pods, lists))
}

// scale sets the number of automatic shards as an autoscaler does, and waits until all shards
// have the given number of members. The selector of the scale must select these.
func (r root) scale(t *testing.T, size, members int32) {
	t.Helper()
	config := r.config(t)
	scale := &autoscalingv1.Scale{}
	require.NoError(t, retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the status changes, too
		if err := cluster.SubResource("scale").Get(t.Context(), config, scale); err != nil {
			return err
		}
		scale.Spec.Replicas = size
		return cluster.SubResource("scale").Update(t.Context(), config, client.WithSubResourceBody(scale))
	}))
	r.settles(t, members)
	until(t, "the scale to have the shards", func(ctx context.Context) error { // one that has given up its keys is removed a round later
		err := cluster.SubResource("scale").Get(ctx, config, scale)
		if err == nil && scale.Status.Replicas != members {
			err = fmt.Errorf("it has %d", scale.Status.Replicas)
		}
		return err
	})
	selected, err := cluster.Clientset.CoreV1().Pods(r.home).List(t.Context(), metav1.ListOptions{LabelSelector: scale.Status.Selector})
	require.NoError(t, err)
	require.Len(t, selected.Items, int(members))
}

// storeIn returns the store of an informer of ConfigMaps that runs in a pod.
func storeIn(t *testing.T, pod *corev1.Pod, selector string) cache.Store {
	t.Helper()
	clientset, err := kubernetes.NewForConfig(from(t, pod))
	require.NoError(t, err)
	factory := informers.NewSharedInformerFactoryWithOptions(clientset, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = selector }))
	informer := factory.Core().V1().ConfigMaps().Informer()
	factory.StartWithContext(t.Context())
	require.True(t, cache.WaitForCacheSync(t.Context().Done(), informer.HasSynced))
	return informer.GetStore()
}

// has waits until a store has these objects, as namespace/name.
func has(t *testing.T, what string, store cache.Store, want []string) {
	t.Helper()
	slices.Sort(want)
	until(t, what, func(context.Context) error {
		got := store.ListKeys()
		slices.Sort(got)
		return orElse(slices.Equal(got, want), fmt.Sprintf("it contains %v, not %v", got, want))
	})
}

// TestDisable disables the root of a Deployment: its pods are restarted and see everything.
func TestDisable(t *testing.T) {
	t.Parallel()
	tenants := newTenants(t, 8)
	tenants.fill(t, "cm")
	r := newRoot(t, "e2e-disable", 2, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		TargetRef: &meshv1alpha1.TargetRef{Kind: "Deployment", Name: workload},
		Auto:      &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
	}})
	running := func(t *testing.T) (pods []*corev1.Pod) {
		t.Helper()
		var list corev1.PodList
		require.NoError(t, cluster.List(t.Context(), &list, client.InNamespace(r.home), client.MatchingLabels{"app": workload}))
		for i := range list.Items {
			if list.Items[i].DeletionTimestamp == nil {
				pods = append(pods, &list.Items[i])
			}
		}
		return pods
	}
	lists := func(pod *corev1.Pod) []string { return tenants.listed(t, pod) }
	r.settles(t, 2)
	sharded := running(t)
	require.Len(t, sharded, 2)
	tenants.divided(t, 1, sharded, lists)

	c := r.config(t)
	before := c.DeepCopy()
	c.Spec.Root.Disable = new(true)
	require.NoError(t, cluster.Patch(t.Context(), c, client.MergeFrom(before)))
	until(t, "the pods to be restarted", func(ctx context.Context) error {
		d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: r.home, Name: workload}}
		if err := cluster.RolledOut(ctx, d); err != nil {
			return err
		}
		for _, pod := range running(t) {
			if slices.ContainsFunc(sharded, func(old *corev1.Pod) bool { return old.UID == pod.UID }) {
				return fmt.Errorf("%s still runs; root: %+v", pod.Name, r.config(t).Status.Root)
			}
		}
		return nil
	})
	for _, pod := range running(t) {
		until(t, pod.Name+" to see everything", func(ctx context.Context) error {
			stdout, stderr, err := cluster.Exec(ctx, pod.Namespace, pod.Name, "probe", "kubectl", "get", "configmaps", "-A", "-l", tenants.selector(), "-o", "name")
			if err == nil && len(strings.Fields(stdout)) != len(tenants) {
				err = fmt.Errorf("it sees %q", stdout)
			}
			if err != nil {
				err = fmt.Errorf("%w: %s", err, stderr)
			}
			return err
		})
	}
}
