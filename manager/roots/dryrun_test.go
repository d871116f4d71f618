package roots

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// TestDryRunEndsWithAFirstGrant checks that no shard owns anything while its members act
// on everything, and that the end of a dry run waits for each of them.
func TestDryRunEndsWithAFirstGrant(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	dryRun := func(on bool) {
		m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.DryRun, c.Spec.Root.OnChange = on, v1alpha1.OnChangeRelist })
	}
	dryRun(true)
	m.pod(0)
	last := m.pod(1)
	for range 2 {
		m.goOn(30*time.Second, nil)
		m.shardsOwnNothing()
		for _, l := range m.get().Status.Locks {
			require.False(t, l.HeldByMesh, "members contend for the lock as it is")
		}
		require.Len(t, m.policies, 2)
		shards := map[string]bool{}
		for _, p := range m.policies {
			require.True(t, p.GetSharding().GetDryRun())
			require.False(t, p.GetSharding().GetStandby())
			require.NotEmpty(t, p.GetSharding().GetLimits()[0].GetScope().GetParts())
			shards[p.GetSharding().GetShard()] = true
		}
		require.Len(t, shards, 2)

		m.deaf[string(last.UID)] = true
		dryRun(false)
		m.goOn(30*time.Second, nil)
		m.shardsOwnNothing()
		m.deaf[string(last.UID)] = false
		m.goOn(30*time.Second, nil)
		require.Len(t, m.owned(), 2)
		for _, p := range m.policies {
			require.False(t, p.GetSharding().GetDryRun())
		}
		dryRun(true) // and once more, with members that owned something
	}
}
