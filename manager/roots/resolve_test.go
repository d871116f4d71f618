package roots

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// subsets is a root with a subset v2 that owns the namespaces of tier one.
func subsets(t *testing.T) *mesh {
	m := newMesh(t)
	m.labels = map[string]labels.Set{"blue": {"tier": "one"}, "green": nil}
	m.root(1, 1)
	m.change(func(c *v1alpha1.ShardingConfig) {
		r := c.Spec.Root
		r.OnChange = v1alpha1.OnChangeRelist
		r.Auto, r.TargetStatefulSet = nil, ""
		r.TargetSelector = &metav1.LabelSelector{MatchLabels: map[string]string{v1alpha1.EnableProxyLabel: "true"}}
		r.Subsets = []v1alpha1.Subset{{Name: "v2", PodLabels: map[string]string{"version": "v2"},
			Namespaces: []v1alpha1.NamespaceMatch{{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "one"}}}}}}
	})
	return m
}

func (m *mesh) version(ordinal int, version string) *corev1.Pod {
	p := m.pod(ordinal)
	p.Labels["version"] = version
	require.NoError(m, m.Update(m.Context(), p))
	return p
}

func TestRelabelledNamespaceIsHandedOver(t *testing.T) {
	t.Parallel()
	m := subsets(t)
	m.version(0, "v1")
	m.version(1, "v2")
	m.settle()
	require.True(t, m.owned()["op-v2"].Equal(sharding.Keys("blue")))

	m.labels["green"] = labels.Set{"tier": "one"}
	m.settle()
	require.True(t, m.owned()["op-v2"].Equal(sharding.Keys("blue", "green")))
	m.labels["blue"] = nil
	m.lead() // a new leader follows the labels too
	m.settle()
	require.True(t, m.owned()["op-v2"].Equal(sharding.Keys("green")))
	require.Empty(t, m.get().Status.Root.Handovers)
}

func TestSubsetWithoutPodsIsReported(t *testing.T) {
	t.Parallel()
	m := subsets(t)
	m.version(0, "v1")
	m.settle()
	require.EqualValues(t, v1alpha1.ReasonNotEnoughPods, m.ready().Reason)
	require.Contains(t, m.ready().Message, "shard op-v2 has fewer than it needs")
}

func TestNamespaceWaitsForAPodOfItsSubset(t *testing.T) {
	t.Parallel()
	m := subsets(t)
	m.labels["blue"] = nil
	m.version(0, "v1")
	m.settle()
	m.labels["blue"] = labels.Set{"tier": "one"}
	m.settle()
	require.True(t, m.owned()["op-default"].Everything(), "no pod of v2 could act on it")
	m.version(1, "v2")
	m.settle()
	require.True(t, m.owned()["op-v2"].Equal(sharding.Keys("blue")))
}

func TestPodWithAnotherVersionLabelIsReplaced(t *testing.T) {
	t.Parallel()
	m := subsets(t)
	m.version(0, "v1")
	m.version(1, "v2")
	m.settle()
	p := m.version(2, "v2")
	m.settle()
	get(m, p).Labels["version"] = "v1"
	require.NoError(t, m.Update(t.Context(), p))
	m.later(2 * outdatedFor)
	require.True(t, apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKeyFromObject(p), p)), "it was not evicted")
}

func TestTooManyMatchingNamespacesChangeNothing(t *testing.T) {
	t.Parallel()
	m := subsets(t)
	m.version(0, "v1")
	m.version(1, "v2")
	m.settle()
	for i := range 1100 {
		m.labels[fmt.Sprint("many-", i)] = labels.Set{"tier": "one"}
	}
	m.settle()
	require.True(t, m.owned()["op-v2"].Equal(sharding.Keys("blue")))
	degraded := apimeta.FindStatusCondition(m.get().Status.Conditions, v1alpha1.ConditionDegraded)
	require.Equal(t, metav1.ConditionTrue, degraded.Status)
	require.Contains(t, degraded.Message, "1101 namespaces match, and at most 1024")
	require.NotEmpty(t, m.inForce)
	for _, p := range m.inForce {
		require.Empty(t, p.Refuse)
	}
}
