package roots

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// Under disable pods are restarted one by one, within a budget, and run unsharded
// once nothing is held. They are ready unless they are refused.
func TestDisableRestartsPodsOneByOne(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.funcs.SubResourceCreate = func(ctx context.Context, c client.Client, sub string, o, s client.Object, opts ...client.SubResourceCreateOption) error {
		var pods corev1.PodList
		require.NoError(t, m.List(ctx, &pods))
		if len(pods.Items) < 3 || slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return m.policies[p.UID].GetRefuse() != "" }) {
			return apierrors.NewTooManyRequests("the budget does not allow it", 10)
		}
		return c.SubResource(sub).Create(ctx, o, s, opts...)
	}
	m.root(3, 1)
	b := m.pod(1)
	m.pod(0)
	m.pod(2)
	m.settle()
	m.deaf[string(b.UID)] = true
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = new(true) })
	m.settle()
	m.settle()
	require.Len(t, m.world().Pods, 3, "b acts on what it held: a successor would be refused")
	clear(m.deaf)
	for i := 0; i < 20 && len(m.get().Status.Root.Assignments) > 0; i++ {
		m.settle()
		for n := range 3 {
			if apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: fmt.Sprintf("op-%d", n)}, &corev1.Pod{})) {
				m.pod(n)
			}
		}
		m.now = m.now.Add(askAgain)
	}
	m.settle()
	root := m.get().Status.Root
	require.Empty(t, root.Assignments)
	require.Empty(t, root.Shards)
	require.Empty(t, m.children())
	require.Len(t, m.policies, 3)
	for _, p := range m.policies {
		require.Empty(t, p.Refuse)
		require.Nil(t, p.Sharding)
	}

	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = nil })
	m.settle()
	require.Len(t, m.owned(), 3)
}

// Shards are given nothing while a pod may run unsharded, though they have members.
func TestEnableWaitsForUnshardedPods(t *testing.T) {
	t.Parallel()
	m, _ := sharded(t, 2)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = new(true) })
	m.settle()
	require.Len(t, m.world().Pods, 1)
	var p *corev1.Pod
	for n := range 2 {
		if apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: fmt.Sprintf("op-%d", n)}, &corev1.Pod{})) {
			p = m.pod(n)
		}
	}
	m.refuseEvictions()
	m.settle()
	require.Empty(t, m.policies[p.UID].Refuse)
	require.Len(t, m.get().Status.Root.Assignments, 1)

	m.away[p.Spec.NodeName] = true
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = nil })
	m.settle()
	state, err := decide.Load(m.get().Status.Root)
	require.NoError(t, err)
	require.False(t, state.Holds())
	clear(m.away)
	m.settle()
	require.Len(t, m.owned(), 2)
	require.Len(t, m.get().Status.Root.Assignments, 2)
}

// Under foreground deletion the garbage collector deletes children first.
func TestDeletedRootCreatesNoChildren(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	a := pods[0]
	m.deaf[string(a.UID)] = true
	require.NoError(t, m.Delete(t.Context(), m.get()))
	m.settle()
	for _, c := range m.children() {
		require.NoError(t, m.Delete(t.Context(), c))
	}
	require.NoError(t, m.round())
	require.Empty(t, m.children())
}

// Nobody is given anything while another pod may act on everything: it ran unsharded
// when it was heard of last, or by a state that was lost.
func TestFirstGrantWaitsForUnshardedPods(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what        string
		first, next func(m *mesh)
	}{
		{"disabled and enabled again",
			func(m *mesh) { m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = new(true) }) },
			func(m *mesh) { m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = nil }) }},
		{"status lost", func(*mesh) {}, func(m *mesh) {
			c := m.get()
			c.Status = v1alpha1.ShardingConfigStatus{}
			require.NoError(m, m.Status().Update(m.Context(), c))
			m.lead()
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			m := newMesh(t)
			m.root(2, 1)
			c.first(m)
			a, b := m.pod(0), m.pod(1)
			m.settle()
			require.Empty(t, m.policies[b.UID].Refuse)
			c.next(m)
			m.away[b.Spec.NodeName] = true // its agent applies the last policy
			m.settle()
			require.Empty(t, m.shardOf(a))
			require.Empty(t, m.get().Status.Root.Shards)
			ready := apimeta.FindStatusCondition(m.get().Status.Conditions, v1alpha1.ConditionReady)
			require.Contains(t, ready.Message, b.Name)
			delete(m.away, b.Spec.NodeName)
			m.settle()
			m.goOn(locksProven, nil)
			require.NotEmpty(t, m.shardOf(a))
			require.Len(t, m.owned(), 2)
		})
	}
}

// A root that is deleted stays until nobody acts on its shards.
func TestDeletedRootStaysUntilNoPodActs(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	root := m.root(2, 1)
	p := m.pod(0)
	m.pod(1)
	m.settle()
	m.away[p.Spec.NodeName] = true
	require.NoError(t, m.Delete(t.Context(), root))
	m.settle()
	require.NotEmpty(t, m.get().Status.Root.Handovers[0].WaitsFor)
	require.Contains(t, m.get().Status.Root.Handovers[0].WaitsFor[0], p.Spec.NodeName)
	delete(m.away, p.Spec.NodeName)
	m.settle()
	require.Len(t, m.world().Pods, 1, "members are replaced one by one")
	require.NoError(t, m.Get(t.Context(), client.ObjectKeyFromObject(root), root))
	require.Empty(t, m.holder("lock"), "successors can lead")
	m.replace(2)
	m.settle()
	require.True(t, apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKeyFromObject(root), root)))
	require.Empty(t, m.world().Configs)
	for _, p := range m.world().Pods {
		require.Equal(t, v1alpha1.TrustBoth, p.Annotations[v1alpha1.TrustAnnotation])
	}
}

// Under Relist a release leaves nothing stale, so members are replaced because they are out of place.
func TestDeletedRootReplacesMembersUnderRelist(t *testing.T) {
	t.Parallel()
	m, _ := sharded(t, 2)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.OnChange = v1alpha1.OnChangeRelist })
	m.settle()
	root := m.get()
	require.NoError(t, m.Delete(t.Context(), root))
	for range 10 {
		m.goOn(outdatedFor, nil)
		m.replace(2)
	}
	require.True(t, apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKeyFromObject(root), root)))
	for _, p := range m.world().Pods {
		require.Equal(t, v1alpha1.TrustBoth, p.Annotations[v1alpha1.TrustAnnotation])
	}
}

// replace makes the pods that were evicted anew, admitted as they are now.
func (m *mesh) replace(replicas int) {
	for n := range replicas {
		if apierrors.IsNotFound(m.Get(m.Context(), client.ObjectKey{Namespace: "ns", Name: fmt.Sprintf("op-%d", n)}, &corev1.Pod{})) {
			p := m.pod(n)
			p.Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth
			if c := m.find(); c != nil {
				p.Annotations[v1alpha1.TrustAnnotation] = compile.Trust(c)
			}
			require.NoError(m, m.Update(m.Context(), p))
		}
	}
	m.now = m.now.Add(askAgain)
}
