package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/tests/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/fleet/fleetv1"
)

// testClusters divides an operator that manages two clusters behind one apiserver. One of them is
// handed over and back, and is away for a while.
func testClusters(t *testing.T) {
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
		root := r.config(t).Status.Root
		for _, s := range root.Shards {
			scope, err := sharding.Parse(s.Held)
			if err != nil {
				return err
			}
			if scope.Owns(a.Name) == scope.Owns(b.Name) {
				return fmt.Errorf("%s owns both or none; %+v", s.Name, root)
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
	size := func(n int32) func(*meshv1alpha1.ShardingConfigSpec) {
		return func(spec *meshv1alpha1.ShardingConfigSpec) { spec.Root.Auto.ShardingSize = n }
	}
	r.change(t, 2, size(1))
	require.Equal(t, owner(a), owner(b))
	r.change(t, 2, size(2))
	require.NotEqual(t, owner(a), owner(b))

	// A cluster that is away holds up no other.
	require.NoError(t, a.Stop(t.Context()))
	owner(b)
	require.NoError(t, a.Start(t.Context()))
	owner(a)

	for _, m := range site.Members {
		writes, err := m.Writes()
		require.NoError(t, err)
		var writers []string // in turn
		for _, w := range writes {
			if len(writers) == 0 || writers[len(writers)-1] != w.Pod {
				writers = append(writers, w.Pod)
			}
		}
		require.NotEmpty(t, writers)
		require.LessOrEqual(t, len(writers), 4, never+": the writers of %s in turn: %v", m.Name, writers)
	}
}
