package lock

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
)

func owner(name, team string) *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Generation: 1}}
	c.Spec.Limits = []v1alpha1.ObjectLimiter{{
		RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{"example.com"}, Resources: []string{"foos"}}},
		Selector:        &metav1.LabelSelector{MatchLabels: map[string]string{"team": team}},
	}}
	return c
}

// While a change of limits is handed over, pods act by others than those of the spec's generation.
func TestOverlapFollowsWhatPodsActBy(t *testing.T) {
	a, b := types.NamespacedName{Namespace: "ns", Name: "a"}, types.NamespacedName{Namespace: "ns", Name: "b"}
	var o overlaps
	confirmed := false
	compare := func(ctx context.Context, configs ...*v1alpha1.ShardingConfig) (string, bool) {
		nobodyActs := func(types.NamespacedName) bool { return confirmed }
		return o.round(ctx, &controllers.Listed{Configs: configs}, nobodyActs).overlap(a, b)
	}
	for range 2 {
		object, ok := compare(t.Context(), owner("a", "one"), owner("b", "two"))
		require.True(t, ok)
		require.Empty(t, object)
	}
	object, ok := compare(t.Context(), owner("a", "one"), owner("b", "one"))
	require.True(t, ok)
	require.Equal(t, "foos with labels {team=one}", object)

	for range 2 {
		object, _ = compare(t.Context(), owner("a", "one"), owner("b", "two"))
		require.NotEmpty(t, object, "pods may still act by what b owned")
	}
	confirmed = true
	object, _ = compare(t.Context(), owner("a", "one"), owner("b", "two"))
	require.Empty(t, object)
	confirmed = false
	object, _ = compare(t.Context(), owner("a", "one"), owner("b", "two"))
	require.Empty(t, object)

	object, ok = compare(t.Context(), owner("a", "one"))
	require.True(t, ok)
	require.Empty(t, object, "b owns nothing")
}

func TestOverlapIsNotKnownBeforeTheComparison(t *testing.T) {
	a, b := types.NamespacedName{Namespace: "ns", Name: "a"}, types.NamespacedName{Namespace: "ns", Name: "b"}
	var o overlaps
	l := &controllers.Listed{Configs: []*v1alpha1.ShardingConfig{owner("a", "one"), owner("b", "one")}}
	never := func(types.NamespacedName) bool { return false }
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, ok := o.round(ended, l, never).overlap(a, b)
	require.False(t, ok)
	for _, ctx := range []context.Context{t.Context(), ended} { // the second time it is remembered
		object, ok := o.round(ctx, l, never).overlap(a, b)
		require.True(t, ok)
		require.NotEmpty(t, object)
	}
}
