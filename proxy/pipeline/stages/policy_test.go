package stages

import (
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

func TestInvalidPathsOfClustersAreRejected(t *testing.T) {
	m := newPod(t)
	for _, path := range []string{"", "/clusters/proxy", "clusters/*/proxy", "/clusters/a*/proxy", "/clusters/*b/proxy", "/clusters/*/*/proxy", "/clusters/*/proxy/"} {
		_, err := Compile(m.env, &meshv1.PodPolicy{Uid: "uid-1", ClusterPaths: []string{path}})
		require.ErrorContains(t, err, "path of clusters", path)
	}
}

func TestPassthroughOfShardedPodIsInvalid(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	for _, p := range []*meshv1.PodPolicy{
		{Passthrough: true, Sharding: policytest.LimitTo("a=b")},
		{Passthrough: true, Refuse: "two configurations"},
	} {
		_, err := Compile(m.env, p)
		require.Error(t, err)
	}
}
