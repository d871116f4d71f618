package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/tests/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/fleet/fleetv1"
)

// TestClusters divides an operator that manages two clusters behind one apiserver. One of them is
// handed over and back, and is away for a while. Then the namespaces of both are divided.
func TestClusters(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat(filepath.Join(cluster.Root, ".run", "kubeconfig")); err != nil {
		t.Skip("only the cluster of tests/cluster can be given others, and there is another")
	}
	site, err := fleet.Install(t.Context(), cluster, namespace(t, "e2e-clusters"), 2, 2)
	once(t, site.Remove)
	require.NoError(t, err)
	r := root{site.Home}
	r.settles(t, 2)
	a, b := site.Members[0], site.Members[1]
	owner := func(m *fleet.Member) string {
		t.Helper()
		by, err := m.Work(t.Context())
		require.NoError(t, err)
		return by
	}
	owner(a)
	owner(b)

	// Without the names of the clusters, hashes decide, and the status says how to change that.
	until(t, "the status to name the missing permission", func(context.Context) error {
		w := r.config(t).Status.Root.Weighing
		return orElse(strings.Contains(w, "may not list clusters."+fleetv1.Group+": kubectl create clusterrole"), w)
	})
	require.NoError(t, site.PermitToList(t.Context()))
	until(t, "each shard to own a cluster", func(context.Context) error {
		for shard, scope := range r.held(t) {
			if scope.Owns(a.Name) == scope.Owns(b.Name) {
				return fmt.Errorf("%s owns both or none", shard)
			}
		}
		return nil
	})
	r.settles(t, 2)
	require.NotEqual(t, owner(a), owner(b))
	until(t, "the method", func(context.Context) error {
		return orElse(r.config(t).Status.Method == string(meshv1alpha1.MethodFilter), "it is "+r.config(t).Status.Method)
	})

	// Both clusters are the first shard's, and one is handed back.
	r.change(t, 1, shards(1))
	require.Equal(t, owner(a), owner(b))
	r.change(t, 2, shards(2))
	require.NotEqual(t, owner(a), owner(b))

	// A cluster that is away holds up no other.
	require.NoError(t, a.Stop(t.Context()))
	owner(b)
	require.NoError(t, a.Start(t.Context()))
	owner(a)

	for _, m := range site.Members {
		requireTurns(t, m, site.Home, 4)
	}
	testNamespacesOfClusters(t, r, site)
}

// testNamespacesOfClusters has the shards divide the namespaces of all clusters instead.
func testNamespacesOfClusters(t *testing.T, r root, site *fleet.Site) {
	// A root's key cannot be changed: another root takes its place while the operator does not run.
	scaled(t, r.home, fleet.Workload, 0)
	until(t, "the operator's pods to end", func(ctx context.Context) error {
		pods := &corev1.PodList{}
		err := cluster.List(ctx, pods, client.InNamespace(r.home), client.MatchingLabels{"app": fleet.Workload})
		return errors.Join(err, orElse(len(pods.Items) == 0, "some are left"))
	})
	before := r.config(t)
	require.NoError(t, cluster.Delete(t.Context(), before.DeepCopy()))
	until(t, "the root to be gone", func(ctx context.Context) error {
		err := cluster.Get(ctx, client.ObjectKeyFromObject(before), &meshv1alpha1.ShardingConfig{})
		return errors.Join(client.IgnoreNotFound(err), orElse(err != nil, "it is there"))
	})
	next := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: before.Namespace, Name: before.Name}, Spec: before.Spec}
	next.Spec.Root.Key = meshv1alpha1.KeyNamespace
	next.Spec.Root.ResourceSelector = []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}}}
	require.NoError(t, cluster.Create(t.Context(), next))
	scaled(t, r.home, fleet.Workload, 2)
	r.settles(t, 2)

	spaces := r.spaces(t)
	for _, m := range site.Members {
		for _, namespace := range spaces {
			require.NoError(t, m.Add(t.Context(), namespace))
		}
	}
	// Each of the namespaces has one owner in all clusters, a pod of the shard that the status names.
	requireOwners := func() (owners sets.Set[string]) {
		t.Helper()
		owners = sets.Set[string]{}
		for _, namespace := range spaces {
			shard := r.holder(t, namespace)
			owners.Insert(shard)
			for _, m := range site.Members {
				by, err := m.WorkIn(t.Context(), namespace)
				require.NoError(t, err)
				require.Equal(t, shard, ready(t, r.home, by).Labels[meshv1alpha1.ShardLabel], "%s in %s", namespace, m.Name)
			}
		}
		return owners
	}
	require.Len(t, requireOwners(), 2)
	r.change(t, 1, shards(1))
	require.Len(t, requireOwners(), 1)
	r.change(t, 2, shards(2))
	requireOwners() // one shard may have both, because other tests have added namespaces
	for _, m := range site.Members {
		for _, namespace := range spaces {
			requireTurns(t, m, namespace, 3)
		}
	}
}

// shards changes the number of shards.
func shards(n int32) func(*meshv1alpha1.ShardingConfigSpec) {
	return func(spec *meshv1alpha1.ShardingConfigSpec) { spec.Root.Auto.ShardingSize = n }
}

// held returns what each shard owns.
func (r root) held(t *testing.T) map[string]sharding.Scope {
	t.Helper()
	out := map[string]sharding.Scope{}
	for _, s := range r.config(t).Status.Root.Shards {
		scope, err := sharding.Parse(s.Held)
		require.NoError(t, err)
		out[s.Name] = scope
	}
	return out
}

// holder returns the shard that owns a namespace.
func (r root) holder(t *testing.T, namespace string) string {
	t.Helper()
	for shard, scope := range r.held(t) {
		if scope.Owns(namespace) {
			return shard
		}
	}
	require.Fail(t, "no shard owns "+namespace)
	return ""
}

// spaces returns names for new namespaces, one for each shard that would own it.
func (r root) spaces(t *testing.T) (names []string) {
	t.Helper()
	for _, scope := range r.held(t) {
		for i := 0; ; i++ {
			if name := fmt.Sprint(r.home, "-", i); scope.Owns(name) {
				names = append(names, name)
				break
			}
		}
	}
	return names
}

// requireTurns checks how often at most the operator's pods took turns at writing in a namespace of a
// member.
func requireTurns(t *testing.T, m *fleet.Member, namespace string, most int) {
	t.Helper()
	writes, err := m.Writes()
	require.NoError(t, err)
	var writers []string // in turn
	for _, w := range writes {
		if w.Namespace == namespace && (len(writers) == 0 || writers[len(writers)-1] != w.Pod) {
			writers = append(writers, w.Pod)
		}
	}
	require.NotEmpty(t, writers)
	require.LessOrEqual(t, len(writers), most, never+": the writers of %s in %s in turn: %v", namespace, m.Name, writers)
}
