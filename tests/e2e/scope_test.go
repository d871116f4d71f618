package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// testScopes is about two members of a root's shards, whose objects bear no label of
// ctrlmesh's: whatever client asks, each namespace is one member's, and all are seen.
func testScopes(t *testing.T) {
	const perTenant = 3
	tenants := newTenants(t, 8)
	for i := range perTenant {
		tenants.fill(t, fmt.Sprintf("cm-%d", i))
	}
	r := newRoot(t, "e2e-scope", 2, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		TargetStatefulSet: workload,
		Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
	}})
	r.settles(t, 2)
	pods := r.pods(t, 2)
	divided := func(t *testing.T, n int, ask func(*corev1.Pod) []string) map[string]string {
		t.Helper()
		return tenants.divided(t, n, pods, ask)
	}
	kubectl := func(command string) func(*corev1.Pod) []string {
		return func(pod *corev1.Pod) []string {
			return strings.Fields(in(t, pod, "sh", "-c", shellPrelude+command))
		}
	}
	selected := "-l " + tenants.selector()
	const columns = " --no-headers | awk '{print $1\"/\"$2}'"

	t.Run("kubectl", func(t *testing.T) {
		divided(t, perTenant, kubectl("kubectl get configmaps -A "+selected+columns))
		divided(t, perTenant, kubectl("kubectl get configmaps -A --chunk-size=5 "+selected+columns))
		divided(t, perTenant, kubectl("kubectl get configmaps -A -o yaml "+selected+` >list; awk '/^    name:/ {name=$2} /^    namespace:/ {print $2"/"name}' list`))
	})
	t.Run("informers", func(t *testing.T) {
		for _, accept := range []string{typeJSON, typeProtobuf} {
			for _, watchList := range []bool{true, false} {
				divided(t, perTenant, func(pod *corev1.Pod) []string {
					var held struct{ Objects map[string]string }
					out := in(t, pod, "probe", "informer", "-accept", accept, fmt.Sprintf("-watchlist=%t", watchList), "-selector", tenants.selector(), "configmaps")
					require.NoError(t, json.Unmarshal([]byte(out), &held))
					return slices.Collect(maps.Keys(held.Objects))
				})
			}
		}
	})
	t.Run("each has something", func(t *testing.T) {
		for _, pod := range pods {
			require.NotEmpty(t, kubectl("kubectl get configmaps -A -o name")(pod))
			require.NotEmpty(t, kubectl("kubectl get nodes -o name")(pod))
		}
	})
	// A watch has what a list has, sooner or later.
	t.Run("watch", func(t *testing.T) {
		tenants.fill(t, "late")
		divided(t, perTenant+1, kubectl(fmt.Sprintf(`
kubectl get configmaps -A -w --no-headers %s >seen &
await sh -c 'n=$(wc -l <seen); m=$(kubectl get configmaps -A --no-headers %s | wc -l); [ $n -ge $m ]'
awk '{print $1"/"$2}' seen`, selected, selected)))
	})
	owners := divided(t, perTenant+1, kubectl("kubectl get configmaps -A "+selected+columns))
	for _, method := range []meshv1alpha1.Method{meshv1alpha1.MethodLabels, meshv1alpha1.MethodFilter, meshv1alpha1.MethodServerSide, meshv1alpha1.MethodAuto} {
		t.Run("method "+string(method), func(t *testing.T) {
			r.change(t, 2, func(s *meshv1alpha1.ShardingConfigSpec) { s.Root.Method = method })
			require.Equal(t, owners, divided(t, perTenant+1, kubectl("kubectl get configmaps -A "+selected+columns)))
		})
	}
	// Members are in standby until they are evicted, and their successors run unsharded.
	t.Run("deleted", func(t *testing.T) {
		root := r.config(t)
		require.NoError(t, cluster.Delete(t.Context(), root))
		until(t, "the root to go", func(ctx context.Context) error {
			err := cluster.Get(ctx, client.ObjectKeyFromObject(root), root)
			if err == nil {
				err = fmt.Errorf("it is there: %+v", root.Status.Root)
			}
			return client.IgnoreNotFound(err)
		})
		for _, pod := range pods {
			now := &corev1.Pod{}
			err := cluster.Get(t.Context(), client.ObjectKeyFromObject(pod), now)
			require.True(t, apierrors.IsNotFound(err) || err == nil && (now.UID != pod.UID || now.DeletionTimestamp != nil), "%s was not replaced: %v", pod.Name, err)
		}
	})
}
