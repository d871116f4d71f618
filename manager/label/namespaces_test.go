package label

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

func TestNamespacesAreLabelled(t *testing.T) {
	namespace := func(name, bucket string) *corev1.Namespace {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "x"}}}
		if bucket != "" {
			ns.Labels[v1alpha1.ShardingHashLabel] = bucket
		}
		return ns
	}
	right := Of("right")[v1alpha1.ShardingHashLabel]
	c := fake.NewClientBuilder().WithObjects(namespace("new", ""), namespace("wrong", "99"), namespace("right", right), namespace("kube-system", "1"), namespace("mesh", "")).Build()
	n := &Namespaces{Client: c, Cache: c, Limiter: rate.NewLimiter(rate.Inf, 1)}
	labelled, err := n.Set(t.Context(), v1alpha1.ShardingHashLabel, Bucket("mesh", platform.Default()))
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"new", "wrong"}, labelled)
	for _, name := range []string{"new", "wrong", "right", "kube-system", "mesh"} {
		ns := &corev1.Namespace{}
		require.NoError(t, c.Get(t.Context(), client.ObjectKey{Name: name}, ns))
		want := map[string]string{"app": "x"}
		if name != "kube-system" && name != "mesh" {
			want[v1alpha1.ShardingHashLabel] = Of(name)[v1alpha1.ShardingHashLabel]
		}
		require.Equal(t, want, ns.Labels, name)
	}
	labelled, err = n.Set(t.Context(), v1alpha1.ShardingHashLabel, Bucket("mesh", platform.Default()))
	require.NoError(t, err)
	require.Empty(t, labelled)
}
