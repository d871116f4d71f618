package roots

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

func TestRootDerivesShardsAndRevertsEdits(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	a, b := pods[0], pods[1]
	require.Len(t, m.owned(), 2)
	require.Equal(t, "op-1-normal", m.shardOf(a))
	require.Equal(t, "op-2-normal", m.shardOf(b))
	require.Equal(t, "op-2-normal", m.policies[b.UID].Sharding.Shard)
	require.EqualValues(t, requestTimeout.Seconds(), m.policies[b.UID].Sharding.RequestTimeoutSeconds)
	require.Contains(t, m.get().Finalizers, v1alpha1.HandoverFinalizer)

	children := m.children()
	require.Len(t, children, 2)
	require.Equal(t, "op", children["op-1-normal"].Labels[v1alpha1.RootLabel])
	require.Equal(t, map[string]string{v1alpha1.ShardLabel: "op-1-normal"}, children["op-1-normal"].Spec.Selector.MatchLabels)
	require.NoError(t, m.Get(t.Context(), client.ObjectKeyFromObject(a), a))
	require.Equal(t, "op-1-normal", a.Labels[v1alpha1.ShardLabel])

	// Edits of others are reverted, and move nothing.
	a.Labels[v1alpha1.ShardLabel] = "op-2-normal"
	require.NoError(t, m.Update(t.Context(), a))
	child := children["op-1-normal"]
	child.Spec.Limits = nil
	require.NoError(t, m.Update(t.Context(), child))
	m.settle()
	require.NoError(t, m.Get(t.Context(), client.ObjectKeyFromObject(a), a))
	require.Equal(t, "op-1-normal", a.Labels[v1alpha1.ShardLabel])
	require.Len(t, m.children()["op-1-normal"].Spec.Limits, 1)
	require.Equal(t, "op-1-normal", m.shardOf(a))
}

// The next leader continues after one that exited before or after a write.
func TestNextLeaderContinuesAfterFailedWrites(t *testing.T) {
	t.Parallel()
	m, _ := sharded(t, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 3 })
	m.pod(1)
	m.pod(2)
	m.refuseEvictions()
	fail := false
	m.funcs.SubResourceUpdate = func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
		err := c.SubResource(sub).Update(ctx, o, opts...)
		if fail {
			return errors.Join(errors.New("the connection broke"), err)
		}
		return err
	}
	for i := range 40 {
		fail = i%3 == 0
		_ = m.round() // fails now and then, written or not
		if i%4 != 0 {
			m.push()
		}
		if i%5 == 0 {
			m.lead()
		}
		m.now = m.now.Add(time.Second)
	}
	fail = false
	m.settle()
	owned := m.owned()
	require.Len(t, owned, 3)
	for name, s := range owned {
		require.False(t, s.Empty(), name)
	}
	require.Empty(t, m.get().Status.Root.Handovers)
}

// The state of the new leader applies: the former leader publishes nothing.
func TestFormerLeaderWritesNothing(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	p := m.pod(0)
	require.NoError(t, m.round())
	m.push()
	old := m.Roots

	// Something else changed: that is no reason to stop.
	m.change(func(c *v1alpha1.ShardingConfig) { metav1.SetMetaDataLabel(&c.ObjectMeta, "a", "b") })
	m.settle()
	require.Equal(t, "op-1-normal", m.shardOf(p))

	m.lead()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	m.pod(1)
	m.settle()
	current := m.Roots
	written := m.get().Status.Root

	m.Roots = old
	m.pod(2) // it would write something
	require.ErrorContains(t, m.round(), "another manager has written")
	require.Equal(t, decide.Durable(written), decide.Durable(m.get().Status.Root))
	m.Roots = current
	m.settle()
}

// A new leader publishes nothing before it has read the recorded state.
func TestNewLeaderReadsBeforeItPublishes(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	root := m.root(1, 1)
	p := m.pod(0)
	m.settle()
	sent := m.policies[p.UID]
	m.lead()
	_, ok := m.States(m.world().Configs, namespaces)
	require.False(t, ok)
	_, ok = m.States(nil, namespaces)
	require.True(t, ok, "without roots there is nothing to wait for")
	require.NoError(t, m.round())
	m.push()
	require.Equal(t, sent.Version, m.policies[p.UID].Version)

	// One whose state makes no sense is left out, and says so.
	c := m.get()
	c.Status.Root.Shards[0].Held = []string{"x"}
	require.NoError(t, m.Status().Update(t.Context(), c))
	m.lead()
	require.ErrorContains(t, m.round(), "status.root.shards[op-1-normal].held")
	known, ok := m.States([]*v1alpha1.ShardingConfig{root}, namespaces)
	require.True(t, ok)
	require.Empty(t, known)
}
