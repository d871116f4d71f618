package roots

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// A pod is in no shard before its agent has said that it acts on nothing.
func TestPodJoinsOnceItIsRefused(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	p := m.pod(0)
	m.deaf[string(p.UID)] = true
	m.settle()
	require.Empty(t, m.shardOf(p))
	require.True(t, m.policies[p.UID].GetSharding().GetStandby())
	m.seen[string(p.UID)] = push.Observation{Reported: true, Capture: v1alpha1.CaptureEBPF, Version: "of an earlier policy"}
	m.settle()
	require.Empty(t, m.shardOf(p))
	delete(m.deaf, string(p.UID))
	m.settle()
	require.Equal(t, "op-1-normal", m.shardOf(p))
}

// releasing is a mesh where shard 2 of pod b waits for keys that the silent agent of pod a has
// yet to release.
func releasing(t *testing.T) (m *mesh, a, b *corev1.Pod) {
	m, pods := sharded(t, 1)
	a = pods[0]
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	b = m.pod(1)
	m.deaf[string(a.UID)] = true
	m.settle()
	return m, a, b
}

// A new shard owns its keys only after the former owner has released them.
func TestHandoverReleasesBeforeItGrants(t *testing.T) {
	t.Parallel()
	m, a, b := releasing(t)
	require.Equal(t, "op-2-normal", m.shardOf(b))
	require.True(t, m.owned()["op-2-normal"].Empty(), "a has not let go")
	require.Equal(t, "Releasing", m.get().Status.Root.Handovers[0].Phase)
	delete(m.deaf, string(a.UID))
	m.settle()
	require.False(t, m.owned()["op-2-normal"].Empty())
	require.Empty(t, m.get().Status.Root.Handovers)

	// a held objects in its caches that are another shard's now.
	err := m.Get(t.Context(), client.ObjectKeyFromObject(a), a)
	require.True(t, apierrors.IsNotFound(err), "it was evicted")
	require.NoError(t, m.round())
	m.push()
	c := m.pod(0)
	m.settle()
	require.Equal(t, "op-1-normal", m.shardOf(c))
	require.Len(t, m.get().Status.Root.Assignments, 2, "a is proven gone")
}

// A new leader goes on with the plan, though one of its shards waits for a pod that
// is ready: what others hold by now does not move again.
func TestPlanSurvivesItsLeader(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.OnChange = v1alpha1.OnChangeRelist })
	m.pod(0)
	m.pod(1)
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 5 })
	m.pod(2)
	m.pod(3)
	m.settle()
	before, err := decide.Load(m.get().Status.Root)
	require.NoError(t, err)
	last := before.Shards["op-5-normal"]
	require.False(t, last.Wanted.Empty())
	require.True(t, last.Owned.Empty(), "it has no pod")

	m.lead()
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.TokenBinding = v1alpha1.TokenBindingOff })
	m.settle()
	after, err := decide.Load(m.get().Status.Root)
	require.NoError(t, err)
	require.Equal(t, before.Shards, after.Shards)

	m.pod(4)
	m.settle()
	require.True(t, m.owned()["op-5-normal"].Equal(last.Wanted))
}

// What was begun is not taken back because agents are away for a moment: they come
// to a new leader one by one, and are replaced.
func TestDisconnectedAgentsRevertNothing(t *testing.T) {
	t.Parallel()
	m, a, b := releasing(t)
	before := m.get().Status.Root
	require.Len(t, before.Handovers, 1)
	goesOn := func() {
		m.settle()
		require.Equal(t, decide.Durable(before), decide.Durable(m.get().Status.Root))
	}

	m.lead()
	m.away[a.Spec.NodeName], m.away[b.Spec.NodeName] = true, true
	goesOn()
	clear(m.away)
	m.now = m.now.Add(status.Grace)
	goesOn()
	m.away[b.Spec.NodeName] = true
	goesOn()

	// A leader that has not heard what a acts on does not know whether it owns that still.
	m.now = m.now.Add(status.Grace)
	goesOn()
}

func TestShardWithoutAgentReturnsItsKeys(t *testing.T) {
	t.Parallel()
	m, _, b := releasing(t)
	require.Len(t, m.get().Status.Root.Handovers, 1)
	m.away[b.Spec.NodeName] = true
	m.now = m.now.Add(status.Grace)
	m.settle()
	require.Empty(t, m.get().Status.Root.Handovers)
	require.True(t, m.owned()["op-1-normal"].Everything())
}
