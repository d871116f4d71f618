package e2e

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// A shard gets other namespaces. Its members see those, and nothing of those they lost,
// without a restart.
func TestMemberFollowsChangedNamespaces(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	third := owned(t)
	clientset, err := kubernetes.NewForConfig(from(t, p.a.Pod))
	require.NoError(t, err)
	factory := informers.NewSharedInformerFactory(clientset, 0)
	maps := factory.Core().V1().ConfigMaps().Informer()
	factory.StartWithContext(t.Context())
	holds := func(want ...string) func(context.Context) error {
		slices.Sort(want)
		return func(context.Context) error {
			var got []string
			for _, obj := range maps.GetStore().List() {
				got = append(got, obj.(*corev1.ConfigMap).Namespace)
			}
			slices.Sort(got)
			if got = slices.Compact(got); !slices.Equal(got, want) {
				return fmt.Errorf("it contains %v, not %v", got, want)
			}
			return nil
		}
	}
	until(t, "the informer", holds(p.a.owns))

	for _, step := range [][]string{{p.a.owns, third}, {third}, {p.a.owns}} { // gains, loses, both
		start := time.Now()
		owns(t, p.namespace, "a", step...)
		until(t, "the informer after the change", holds(step...))
		t.Logf("updated after %v", time.Since(start).Round(time.Millisecond))
	}
	require.Zero(t, restarts(t, p.a.Pod))
	p.b.works(t)
}

// A running member's configuration is deleted. The member then sees nothing, instead of
// everything, and its shard again when the configuration is back.
func TestMemberSeesNothingWithoutItsConfig(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	c := &meshv1alpha1.ShardingConfig{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: p.namespace, Name: "a"}, c))
	require.NoError(t, cluster.Delete(t.Context(), c))
	p.a.refused(t, "no ShardingConfig selects it")
	p.b.works(t)

	create(t, shard(p.namespace, "a", []string{p.a.Name}, []string{p.a.owns}, "configmaps"))
	p.a.works(t)
	require.Zero(t, restarts(t, p.a.Pod))
}

// owns changes what a shard owns.
func owns(t *testing.T, namespace, shard string, namespaces ...string) {
	t.Helper()
	c := &meshv1alpha1.ShardingConfig{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: shard}, c))
	before := c.DeepCopy()
	c.Spec.Limits[0].Selector = oneOf(meshv1alpha1.NamespaceLabel, namespaces...)
	require.NoError(t, cluster.Patch(t.Context(), c, client.MergeFrom(before)))
}

// restarts returns how often a pod's container was restarted.
func restarts(t *testing.T, pod *corev1.Pod) int32 {
	t.Helper()
	return ready(t, pod.Namespace, pod.Name).Status.ContainerStatuses[0].RestartCount
}
