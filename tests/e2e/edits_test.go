package e2e

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// TestEdits has a root whose author misspells a resource, first at its creation and then
// while its shards act. Neither gives an object two owners.
func TestEdits(t *testing.T) {
	t.Parallel()
	tenants := newTenants(t, 4)
	tenants.fill(t, "one")
	r := newRoot(t, "e2e-edits", 2, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		TargetStatefulSet: workload,
		OnChange:          meshv1alpha1.OnChangeRelist,
		Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
		ResourceSelector:  listing("configmap"),
	}})
	r.reports(t, meshv1alpha1.ReasonUnknownResource, "did you mean configmaps?")
	pods := r.pods(t, 2)
	for _, pod := range pods {
		c, err := kubernetes.NewForConfig(from(t, pod))
		require.NoError(t, err)
		written := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "written-by-" + pod.Name}}
		_, err = c.CoreV1().ConfigMaps(tenants[0]).Create(t.Context(), written, metav1.CreateOptions{})
		require.True(t, apierrors.IsServiceUnavailable(err), "%s: it is in no shard: %v", never, err)
	}

	resources := func(name string) {
		t.Helper()
		c := r.config(t)
		before := c.DeepCopy()
		c.Spec.Root.ResourceSelector = listing(name)
		require.NoError(t, cluster.Patch(t.Context(), c, client.MergeFrom(before)))
	}
	resources("configmaps")
	r.settles(t, 2)
	r.reports(t, meshv1alpha1.ReasonSettled, "")
	listed := func(pod *corev1.Pod) []string { return tenants.listed(t, pod) }
	owners := tenants.divided(t, 1, pods, listed)

	resources("confgimaps")
	r.reports(t, meshv1alpha1.ReasonUnknownResource, "did you mean configmaps?")
	require.Equal(t, owners, tenants.divided(t, 1, pods, listed), "%s: the shards keep what they have", never)
	resources("configmaps")
	r.reports(t, meshv1alpha1.ReasonSettled, "")

	r.change(t, 2, func(s *meshv1alpha1.ShardingConfigSpec) { s.DryRun = true })
	until(t, "a dry run that divides nothing", func(context.Context) error {
		for _, pod := range pods {
			if n := len(listed(pod)); n != len(tenants) {
				return fmt.Errorf("%s lists %d objects of %d", pod.Name, n, len(tenants))
			}
		}
		return nil
	})
	r.change(t, 2, func(s *meshv1alpha1.ShardingConfigSpec) { s.DryRun = false })
	r.reports(t, meshv1alpha1.ReasonSettled, "")
	require.Len(t, tenants.divided(t, 1, pods, listed), len(tenants))
}

// reports waits until Ready of the root's current spec has a reason, and a message with a text.
func (r root) reports(t *testing.T, reason meshv1alpha1.Reason, text string) {
	t.Helper()
	reports(t, r.config(t), reason, text)
}

// reports waits until Ready of a configuration's current spec has a reason, and a message with a text.
func reports(t *testing.T, c *meshv1alpha1.ShardingConfig, reason meshv1alpha1.Reason, text string) {
	t.Helper()
	until(t, "reason "+string(reason), func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
			return err
		}
		ready := meta.FindStatusCondition(c.Status.Conditions, meshv1alpha1.ConditionReady)
		switch {
		case ready == nil || ready.ObservedGeneration < c.Generation:
			return fmt.Errorf("the manager has not seen generation %d: %+v", c.Generation, ready)
		case ready.Reason != string(reason):
			return fmt.Errorf("it is %s: %s", ready.Reason, ready.Message)
		}
		require.Contains(t, ready.Message, text)
		return nil
	})
}
