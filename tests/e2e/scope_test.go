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

// scopeTest has the subtests of TestScopes: two members of a root, and the objects of its
// tenants.
type scopeTest struct {
	tenants tenants
	root    root
	pods    []*corev1.Pod
}

// perTenant is how many objects each tenant has, until the subtest watch adds one.
const perTenant = 3

// TestScopes has two members of a root's shards, whose objects have no label of the mesh.
// For every client, each namespace belongs to one member, and no object is missing.
func TestScopes(t *testing.T) {
	t.Parallel()
	tenants := newTenants(t, 8)
	for i := range perTenant {
		tenants.fill(t, fmt.Sprintf("cm-%d", i))
	}
	r := newRoot(t, "e2e-scope", 2, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		TargetStatefulSet: workload,
		OnChange:          meshv1alpha1.OnChangeRelist,
		Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
	}})
	r.settles(t, 2)
	pods := r.pods(t, 2)

	s := &scopeTest{tenants: tenants, root: r, pods: pods}
	t.Run("kubectl", s.kubectl)
	t.Run("informers", s.informers)
	t.Run("each has something", s.noneEmpty)
	// A watch delivers what a list contains, with a delay.
	t.Run("watch", s.watch)
	owners := s.divided(t, perTenant+1, words(t, s.listCommand("")+nameColumns))
	t.Run("the plugin names the owners", func(t *testing.T) {
		pod := map[string]string{} // by shard
		for namespace, owner := range owners {
			name := ownerByPlugin(t, r.home, "root", namespace)
			require.Contains(t, []string{"", owner}, pod[name], "shard %s has two pods", name)
			pod[name] = owner
		}
		require.Len(t, pod, 2)
	})
	t.Run("the plugin explains writes", func(t *testing.T) { s.explained(t, tenants[0], owners[tenants[0]]) })
	for _, method := range []meshv1alpha1.Method{meshv1alpha1.MethodLabels, meshv1alpha1.MethodFilter, meshv1alpha1.MethodServerSide, meshv1alpha1.MethodAuto} {
		t.Run("method "+string(method), func(t *testing.T) {
			r.change(t, 2, func(spec *meshv1alpha1.ShardingConfigSpec) { spec.Root.Method = method })
			require.Equal(t, owners, s.divided(t, perTenant+1, words(t, s.listCommand("")+nameColumns)))
		})
	}
	// Members are in standby until they are evicted, and their successors run unsharded.
	t.Run("deleted", s.deleted)
}

// explained requires that the plugin explains writes of the members in a tenant that a pod owns.
func (s *scopeTest) explained(t *testing.T, tenant, owner string) {
	shard := ownerByPlugin(t, s.root.home, "root", tenant)
	for _, pod := range s.pods {
		args := []string{"explain", pod.Name, "update", "configmaps", "cm-0", "--object-namespace", tenant, "-n", s.root.home}
		if pod.Name == owner {
			says(t, 0, args, "passes unchanged: shard "+shard+" owns namespace "+tenant)
		} else {
			says(t, 1, args, "403 foreign", "shard "+shard+" owns it", "isolation: Enforce")
		}
	}
}

// divided asks each member for its objects, n of each tenant in all, and returns the owner
// of each tenant.
func (s *scopeTest) divided(t *testing.T, n int, ask func(*corev1.Pod) []string) map[string]string {
	t.Helper()
	return s.tenants.divided(t, n, s.pods, ask)
}

// words returns a function that runs a script in a pod and returns the words it printed.
func words(t *testing.T, script string) func(*corev1.Pod) []string {
	return func(pod *corev1.Pod) []string {
		return strings.Fields(in(t, pod, "sh", "-c", shellPrelude+script))
	}
}

// listCommand returns the command that lists the tenants' objects in all namespaces.
func (s *scopeTest) listCommand(flags string) string {
	return "kubectl get configmaps -A " + flags + "-l " + s.tenants.selector()
}

// nameColumns has kubectl print namespace/name of each object.
const nameColumns = " --no-headers | awk '{print $1\"/\"$2}'"

func (s *scopeTest) kubectl(t *testing.T) {
	s.divided(t, perTenant, words(t, s.listCommand("")+nameColumns))
	s.divided(t, perTenant, words(t, s.listCommand("--chunk-size=5 ")+nameColumns))
	s.divided(t, perTenant, words(t, s.listCommand("-o yaml ")+` >list; awk '/^    name:/ {name=$2} /^    namespace:/ {print $2"/"name}' list`))
}

func (s *scopeTest) informers(t *testing.T) {
	for _, accept := range []string{typeJSON, typeProtobuf} {
		for _, watchList := range []bool{true, false} {
			s.divided(t, perTenant, func(pod *corev1.Pod) []string {
				var held struct{ Objects map[string]string }
				out := in(t, pod, "probe", "informer", "-accept", accept, fmt.Sprintf("-watchlist=%t", watchList), "-selector", s.tenants.selector(), "configmaps")
				require.NoError(t, json.Unmarshal([]byte(out), &held))
				return slices.Collect(maps.Keys(held.Objects))
			})
		}
	}
}

func (s *scopeTest) noneEmpty(t *testing.T) {
	for _, pod := range s.pods {
		require.NotEmpty(t, words(t, "kubectl get configmaps -A -o name")(pod))
		require.NotEmpty(t, words(t, "kubectl get nodes -o name")(pod))
	}
}

func (s *scopeTest) watch(t *testing.T) {
	s.tenants.fill(t, "late")
	selected := "-l " + s.tenants.selector()
	s.divided(t, perTenant+1, words(t, fmt.Sprintf(`
kubectl get configmaps -A -w --no-headers %s >seen &
await sh -c 'n=$(wc -l <seen); m=$(kubectl get configmaps -A --no-headers %s | wc -l); [ $n -ge $m ]'
awk '{print $1"/"$2}' seen`, selected, selected)))
}

func (s *scopeTest) deleted(t *testing.T) {
	root := s.root.config(t)
	require.NoError(t, cluster.Delete(t.Context(), root))
	until(t, "the root to go", func(ctx context.Context) error {
		err := cluster.Get(ctx, client.ObjectKeyFromObject(root), root)
		if err == nil {
			err = fmt.Errorf("it is there: %+v", root.Status.Root)
		}
		return client.IgnoreNotFound(err)
	})
	for _, pod := range s.pods {
		now := &corev1.Pod{}
		err := cluster.Get(t.Context(), client.ObjectKeyFromObject(pod), now)
		require.True(t, apierrors.IsNotFound(err) || err == nil && (now.UID != pod.UID || now.DeletionTimestamp != nil), "%s was not replaced: %v", pod.Name, err)
	}
}
