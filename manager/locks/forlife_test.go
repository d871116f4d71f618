package locks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The lock of a leader for life is a ConfigMap that the leader's pod owns. It has no record.
func TestLeaderForLifeHoldsTheLock(t *testing.T) {
	lock := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: leader.Namespace, Name: leader.Name,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "op-7c9f-bbbbb", UID: "pod"}}}}
	c := newCluster(t, lock)
	for range 50 {
		s := c.round(demand(Acquire, leader))
		require.False(t, s.Held)
		require.Equal(t, "op-7c9f-bbbbb", s.Holder)
		require.Zero(t, s.Expires)
		require.Equal(t, []string{ConfigMaps}, s.Resources)
	}
	require.NoError(t, c.Delete(t.Context(), lock)) // with its pod
	d := demand(Acquire, leader)
	d.Locks[0].Resources = []string{ConfigMaps} // as the status has it since
	c.round(d)
	c.now = c.now.Add(time.Second)
	s := c.round(d)
	require.True(t, s.Held, "%+v", s)
	require.NoError(t, c.Get(t.Context(), leader, lock), "another leader for life finds it")
	require.Empty(t, lock.OwnerReferences)
}

// A ConfigMap of a pod that is a lock by its record is judged by that.
func TestRecordComesBeforeTheOwner(t *testing.T) {
	lock := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: leader.Namespace, Name: leader.Name,
		Annotations:     map[string]string{"control-plane.alpha.kubernetes.io/leader": `{"holderIdentity":""}`},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "op-0", UID: "pod"}}}}
	require.True(t, newCluster(t, lock).round(demand(Keep, leader)).Held)
}
