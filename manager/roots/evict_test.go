package roots

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// A budget keeps a pod from being evicted: that is said, and tried again.
func TestEvictionsAwaitTheDisruptionBudget(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 1)
	a := pods[0]
	asked := 0
	m.funcs.SubResourceCreate = func(_ context.Context, _ client.Client, sub string, _, s client.Object, _ ...client.SubResourceCreateOption) error {
		asked++
		require.Equal(t, "eviction", sub)
		require.Equal(t, a.UID, *s.(*policyv1.Eviction).DeleteOptions.Preconditions.UID)
		return apierrors.NewTooManyRequests("the budget does not allow it", 10)
	}
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	m.pod(1)
	m.settle()
	require.Equal(t, 1, asked)
	require.True(t, slices.ContainsFunc(m.get().Status.Conditions, func(c metav1.Condition) bool {
		return c.Status == metav1.ConditionTrue && len(c.Message) > 0
	}))
	m.now = m.now.Add(askAgain)
	m.funcs.SubResourceCreate = nil
	m.settle()
	require.True(t, apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKeyFromObject(a), a)))
}

// stale is a mesh where op-0 and op-1, of shard 1, are stale. They were not evicted,
// for a budget kept them; it does no more.
func stale(t *testing.T) (m *mesh, evicted *[]string) {
	m, evicted = newMesh(t), &[]string{}
	m.refuseEvictions()
	m.root(1, 2)
	for i := range 4 {
		m.pod(i)
	}
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	m.settle()
	require.Len(t, slices.DeleteFunc(m.get().Status.Root.Assignments, func(a v1alpha1.Assignment) bool { return !a.Stale }), 2)
	m.now = m.now.Add(time.Minute)
	m.funcs.SubResourceCreate = func(ctx context.Context, c client.Client, sub string, o, s client.Object, opts ...client.SubResourceCreateOption) error {
		*evicted = append(*evicted, o.GetName())
		return c.SubResource(sub).Create(ctx, o, s, opts...)
	}
	return m, evicted
}

// Agents that were not heard of are no reason to evict anybody.
func TestLeaderWithoutReportsEvictsNoPod(t *testing.T) {
	t.Parallel()
	m, evicted := stale(t)
	m.lead()
	for i := range 4 {
		m.away[fmt.Sprintf("node-%d", i)] = true
	}
	require.NoError(t, m.round())
	require.Empty(t, *evicted)
}

// workload is the StatefulSet of the pods.
func (m *mesh) workload(replicas int32) {
	require.NoError(m, m.Create(m.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op"}, Spec: appsv1.StatefulSetSpec{Replicas: &replicas},
	}))
}

// Nobody waits for the successor of a pod that was evicted just before its workload was scaled down.
func TestScaledDownWorkloadNeedsNoSuccessor(t *testing.T) {
	t.Parallel()
	m, evicted := stale(t)
	m.workload(3)
	m.later(100 * time.Second)
	require.Len(t, *evicted, 2)
}

// Successors are waited for, however long it takes, and until they are members.
func TestNextEvictionWaitsForTheSuccessor(t *testing.T) {
	t.Parallel()
	m, evicted := stale(t)
	m.workload(4)
	m.later(10 * time.Minute)
	require.Len(t, *evicted, 1)
	require.Contains(t, fmt.Sprint(m.get().Status.Conditions), "its successor does not exist yet")
	var n int
	_, err := fmt.Sscanf((*evicted)[0], "op-%d", &n)
	require.NoError(t, err)
	p := m.pod(n)
	m.deaf[string(p.UID)] = true
	m.settle()
	require.Len(t, *evicted, 1, "it is in no shard yet")
	clear(m.deaf)
	m.settle()
	require.Len(t, *evicted, 2)
}

// Nor are agents that have yet to confirm the last change.
func TestUnreadyMemberBlocksEvictions(t *testing.T) {
	t.Parallel()
	m, evicted := stale(t)
	p := &corev1.Pod{}
	require.NoError(t, m.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: "op-2"}, p))
	p.Status.Conditions[0].Status = corev1.ConditionFalse
	require.NoError(t, m.Status().Update(t.Context(), p))
	m.settle()
	require.Empty(t, *evicted)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.TokenBinding = v1alpha1.TokenBindingOff })
	for uid := range m.seen {
		m.deaf[uid] = true
	}
	m.settle()
	require.Empty(t, *evicted)
	clear(m.deaf)
	p.Status.Conditions[0].Status = corev1.ConditionTrue
	require.NoError(t, m.Status().Update(t.Context(), p))
	m.settle()
	require.Len(t, *evicted, 1)
}
