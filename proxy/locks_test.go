package proxy

import (
	"testing"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// TestEachLockIsRenamed checks several locks of one pod, two of them in one namespace.
func TestEachLockIsRenamed(t *testing.T) {
	t.Parallel()
	api := &leases{t: t, objs: map[string]*coordinationv1.Lease{}}
	api.then = api.serve
	m := newMesh(t, &api.recorder)
	s := &meshv1.Sharding{Shard: "s1", Limits: []*meshv1.Limit{{Selector: "a=b"}}, Locks: []*meshv1.Lock{
		{Namespace: "kube-system", Name: "one", UpstreamName: "one---s1"},
		{Namespace: "kube-system", Name: "two", UpstreamName: "two---s1"},
		{Namespace: "ns", Name: "three", UpstreamName: "three---s1"},
	}}
	m.policy(s)
	c, err := coordinationclient.NewForConfig(m.config("v1"))
	require.NoError(t, err)
	create := func(namespace, name string) {
		t.Helper()
		holder, seconds := "pod_1", int32(15)
		lease := &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds},
		}
		got, err := c.Leases(namespace).Create(t.Context(), lease, metav1.CreateOptions{})
		require.NoError(t, err)
		require.Equal(t, name, got.Name)
	}
	create("kube-system", "two")
	require.Equal(t, []string{"kube-system/two"}, m.pod.HeldLocks())
	create("ns", "three")
	require.False(t, m.pod.LockHolder(), "one of three is free")
	create("kube-system", "one")
	require.True(t, m.pod.LockHolder())
	require.Equal(t, []string{"kube-system/one", "kube-system/two", "ns/three"}, m.pod.HeldLocks())
	require.Len(t, m.pod.Holders(), 3)
	create("kube-system", "three")
	require.Contains(t, api.objs, "three", "the lock of this name is in another namespace")
	for _, name := range []string{"one---s1", "two---s1", "three---s1"} {
		require.Contains(t, api.objs, name)
	}

	require.NoError(t, c.Leases("kube-system").Delete(t.Context(), "one", metav1.DeleteOptions{}))
	require.False(t, m.pod.LockHolder(), "one was deleted")

	renamed := &meshv1.Sharding{Shard: "s1", Limits: s.Limits, Locks: s.Locks[2:]}
	m.policy(renamed)
	require.True(t, m.pod.LockHolder(), "the only lock that is left")
	create("ns", "three")
	require.Len(t, m.pod.Holders(), 1, "what the policy does not name any more is forgotten")
}
