package layout

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

func pinnedTo(shard string) labels.Set { return labels.Set{v1alpha1.OwnerShardLabel: shard} }

// Labels come and go while the number of shards changes and weights are evened out.
func TestPinnedNamespacesBelongToTheirShard(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	namespaces, weights := map[string]labels.Set{}, Weights{}
	for i := range 60 {
		name := fmt.Sprint("tenant-", i)
		namespaces[name], weights[name] = nil, random.Int64N(50)
	}
	root := withCanary(auto(3), []string{"tenant-1", "tenant-2"})
	var last map[string]sharding.Scope
	for range 300 {
		switch random.IntN(4) {
		case 0:
			root.Auto.ShardingSize = 1 + random.Int32N(5)
		case 1:
			last, _ = Balance(resolved(t, root, namespaces), last, weights, Pace{Above: Hysteresis})
		default:
			name := fmt.Sprint("tenant-", random.IntN(len(namespaces)))
			namespaces[name] = []labels.Set{nil, pinnedTo("op-0-canary"), pinnedTo("op-1-normal"), pinnedTo("op-2-normal"), pinnedTo("other")}[random.IntN(5)]
		}
		now := resolved(t, root, namespaces)
		next := Next(now, last, weights)
		whole(t, now, next)
		require.False(t, Repinned(now, next))
		for name, of := range namespaces {
			if shard := of[v1alpha1.OwnerShardLabel]; shard != "" && !next[shard].Empty() {
				require.True(t, next[shard].Owns(name), "%s of %s", name, shard)
			}
		}
		last = next
	}
}

func TestNamespaceReturnsWithoutItsPin(t *testing.T) {
	root := auto(4)
	before := First(root, nil)
	namespaces := map[string]labels.Set{}
	for i := range 50 {
		namespaces[fmt.Sprint("ns-", i)] = pinnedTo("op-4-normal")
	}
	pinned := resolved(t, root, namespaces)
	require.True(t, Repinned(pinned, before))
	during := Next(pinned, before, nil)
	require.True(t, Repinned(root, during))
	after := Next(root, during, nil)
	require.True(t, maps.EqualFunc(before, after, sharding.Scope.Equal))
}

func TestPinsThatCannotBeFollowed(t *testing.T) {
	many := map[string]labels.Set{}
	for i := range MaxNamespaces + 1 {
		many[fmt.Sprint("ns-", i)] = pinnedTo("op-1-normal")
	}
	spec := v1alpha1.ShardingConfigSpec{Root: auto(2)}
	require.ErrorContains(t, Resolve(&spec, many), "1025 namespaces name op-1-normal")
	require.Empty(t, spec.Root.PinnedNamespaces)

	spec.Root.Method = v1alpha1.MethodServerSide
	require.ErrorContains(t, Resolve(&spec, map[string]labels.Set{"a": pinnedTo("op-1-normal")}), "choose Auto")

	spec.Root.Method, spec.Root.Key = v1alpha1.MethodAuto, v1alpha1.KeyObject
	require.NoError(t, Resolve(&spec, map[string]labels.Set{"a": pinnedTo("op-1-normal")}))
	require.Empty(t, spec.Root.PinnedNamespaces, "the keys are uids")
}
