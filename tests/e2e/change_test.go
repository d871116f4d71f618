package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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

// A namespace moves from one hand-written shard to another while the agent of a member that loses
// it is stopped, and so may have a write of it in flight. The other shard gets it once that
// agent has confirmed, and nothing but that stops.
func TestHandWrittenShardsHandOver(t *testing.T) {
	p := newPair(t)
	moved := owned(t)
	writes := func(m *member) func(context.Context) error {
		clientset, err := kubernetes.NewForConfig(from(t, m.Pod))
		require.NoError(t, err)
		return func(ctx context.Context) error {
			_, err := clientset.CoreV1().ConfigMaps(moved).Patch(ctx, "here", types.MergePatchType, []byte(`{"data": {"by": "`+m.Name+`"}}`), metav1.PatchOptions{})
			return err
		}
	}
	a, b := writes(p.a), writes(p.b)
	owns(t, p.namespace, "a", p.a.owns, moved)
	until(t, "a to own the namespace", a)
	require.True(t, apierrors.IsForbidden(b(t.Context())))

	signalAgent(t, p.a.Spec.NodeName, "STOP")
	running := sync.OnceFunc(func() { signalAgent(t, p.a.Spec.NodeName, "CONT") })
	t.Cleanup(running)
	owns(t, p.namespace, "a", p.a.owns)
	owns(t, p.namespace, "b", p.b.owns, moved)
	until(t, "b to wait for a", func(ctx context.Context) error {
		c := &meshv1alpha1.ShardingConfig{}
		if err := cluster.Get(ctx, client.ObjectKey{Namespace: p.namespace, Name: "b"}, c); err != nil {
			return err
		}
		is := meta.FindStatusCondition(c.Status.Conditions, meshv1alpha1.ConditionReady)
		return orElse(is != nil && is.ObservedGeneration == c.Generation && is.Reason == string(meshv1alpha1.ReasonHandingOver) && strings.Contains(is.Message, "pod a"), fmt.Sprintf("%+v", is))
	})
	require.True(t, apierrors.IsForbidden(b(t.Context())), "a may still write there")
	p.b.works(t)
	running()
	until(t, "b to own the namespace", b)
	require.True(t, apierrors.IsForbidden(a(t.Context())))
	settled(t, p.namespace, "b", 1)
	p.a.works(t)
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
