package roots

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// A pod that ran unsharded is deleted by force: its processes act on everything until its
// agent refuses them.
func TestFirstGrantWaitsForPodsDeletedByForce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		policy      v1alpha1.FailurePolicy
		silent, end func(m *mesh, p *corev1.Pod)
	}{
		"until its agent confirms": {
			v1alpha1.FailClosed,
			func(m *mesh, p *corev1.Pod) { m.deaf[string(p.UID)] = true },
			func(m *mesh, p *corev1.Pod) { delete(m.deaf, string(p.UID)) },
		},
		"until its agent confirms, of a pod that fails open": {
			v1alpha1.FailOpen,
			func(m *mesh, p *corev1.Pod) { m.deaf[string(p.UID)] = true },
			func(m *mesh, p *corev1.Pod) { delete(m.deaf, string(p.UID)) },
		},
		"until a request timeout after its agent fell silent": {
			v1alpha1.FailClosed,
			func(m *mesh, p *corev1.Pod) { m.away[p.Spec.NodeName] = true },
			func(m *mesh, p *corev1.Pod) { m.goOn(meshv1.LostWrite+2*time.Second, nil) },
		},
		"until a request timeout after its agent fell silent, of a pod that fails open": {
			v1alpha1.FailOpen,
			func(m *mesh, p *corev1.Pod) { m.away[p.Spec.NodeName] = true },
			func(m *mesh, p *corev1.Pod) { m.goOn(meshv1.LostWrite+2*time.Second, nil) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			m.root(1, 1)
			m.change(func(of *v1alpha1.ShardingConfig) { of.Spec.Root.Disable, of.Spec.FailurePolicy = new(true), c.policy })
			trusting := func(p *corev1.Pod) *corev1.Pod {
				if c.policy == v1alpha1.FailOpen {
					p.Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth
					require.NoError(t, m.Update(t.Context(), p))
				}
				return p
			}
			p := trusting(m.pod(0))
			m.settle()
			require.Nil(t, m.policies[p.UID].GetSharding(), "it acts on everything")
			c.silent(m, p)
			require.NoError(t, m.Delete(t.Context(), p))
			m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = nil })
			trusting(m.pod(1))
			m.goOn(requestTimeout, nil)
			m.shardsOwnNothing()
			require.Contains(t, m.ready().Message, "pod op-0 on node node-0, which was deleted or has exited, and may run on")
			require.NotEmpty(t, m.policies[p.UID].Refuse)
			c.end(m, p)
			m.settle()
			require.Len(t, m.owned(), 1)
			require.NotContains(t, m.policies, p.UID)
		})
	}
}

// A refusal bars what the pod was sent before, so the pod is served under a later serial.
func TestMemberIsServedAgainAfterARefusal(t *testing.T) {
	t.Parallel()
	for name, old := range map[string]bool{"agents": false, "agents that do not say that they bar a serial": true} {
		t.Run(name, func(t *testing.T) { servedAgainAfterARefusal(t, old) })
	}
}

func servedAgainAfterARefusal(t *testing.T, oldAgents bool) {
	m := newMesh(t)
	m.oldAgents = oldAgents
	m.root(2, 1)
	p := m.pod(0)
	m.pod(1)
	m.settle()
	before := m.policies[p.UID].Serial
	other := m.conflict(p)
	m.settle()
	require.NotEmpty(t, m.inForce[string(p.UID)].Refuse)
	require.NoError(t, m.Delete(t.Context(), other))
	m.settle()
	require.Empty(t, m.inForce[string(p.UID)].Refuse)
	require.Equal(t, before+1, m.inForce[string(p.UID)].Serial)
	require.False(t, m.get().Status.Root.RolledBack)
	require.Len(t, m.owned(), 2)
}

// A pod that loses the label of the mesh is refused and leaves its shard. It is no sign of a
// restore that it has had later policies than other pods without a shard.
func TestPodThatLostItsLabelJoinsAgain(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	p, other := pods[0], pods[1]
	p = get(m, p)
	delete(p.Labels, v1alpha1.EnableProxyLabel)
	require.NoError(t, m.Update(t.Context(), p))
	m.settle()
	require.Empty(t, m.shardOf(p))
	p.Labels[v1alpha1.EnableProxyLabel] = "true"
	require.NoError(t, m.Update(t.Context(), p))
	m.settle()
	require.NotEmpty(t, m.shardOf(p))
	require.False(t, m.get().Status.Root.RolledBack)
	m.notRolledBack()
	require.NotEmpty(t, m.inForce[string(other.UID)].Serial)
	require.Len(t, m.owned(), 2)
}

// notRolledBack asserts that no Event said that a root was rolled back.
func (m *mesh) notRolledBack() {
	m.Helper()
	for len(m.recorder.Events) > 0 {
		require.NotContains(m, <-m.recorder.Events, "RolledBack")
	}
}

// The pod was a member of another root, whose serials are other ones.
func TestPodOfAnotherRootJoins(t *testing.T) {
	t.Parallel()
	for name, barred := range map[string]bool{"it was refused since": true, "it was not refused": false} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			m.root(2, 1)
			m.pod(0)
			m.settle()
			p := m.pod(1)
			uid, serial := string(p.UID), m.now.Add(time.Hour).UnixMilli()
			m.seen[uid] = push.Observation{Reported: true, Capture: v1alpha1.CaptureEBPF, Serial: serial, Barred: barred}
			m.floors[uid] = serial + 1
			m.settle()
			require.NotEmpty(t, m.shardOf(p))
			require.Greater(t, m.inForce[uid].Serial, uint64(serial))
			m.notRolledBack()
		})
	}
}

// No key moves while a pod may act that has had a serial of which the status says nothing:
// it may have joined a shard after a backup was made.
func TestNothingMovesBesideAPodWithAnUnknownSerial(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.OnChange = v1alpha1.OnChangeRelist })
	m.pod(0)
	m.pod(1)
	m.settle()
	p := m.pod(2)
	uid, serial := string(p.UID), m.now.Add(time.Hour).UnixMilli()
	m.seen[uid] = push.Observation{Reported: true, Capture: v1alpha1.CaptureEBPF, Serial: serial}
	m.deaf[uid] = true
	m.size(3)
	m.settle()
	require.Len(t, m.get().Status.Root.Shards, 2)
	delete(m.deaf, uid)
	m.settle()
	require.Len(t, m.owned(), 3)
	require.False(t, m.owned()["op-3-normal"].Empty())
	m.notRolledBack()
}

// A refused member acts on nothing, so that the keys of its shard may move, but takes none.
func TestKeysLeaveAShardWithARefusedMember(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.OnChange = v1alpha1.OnChangeRelist })
	p := m.pod(0)
	m.pod(1)
	m.settle()
	m.conflict(p)
	m.settle()
	refused, before := m.shardOf(p), m.owned()
	m.pod(2)
	m.size(3)
	m.settle()
	require.False(t, m.owned()["op-3-normal"].Empty())
	require.True(t, m.owned()[refused].Minus(before[refused]).Empty())
	require.Empty(t, m.get().Status.Root.Handovers)
}

// A node is partitioned while another manager becomes the leader: only handovers from and to
// its shard wait.
func TestHandoversGoOnBesideAPartitionedNode(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(3, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.OnChange = v1alpha1.OnChangeRelist })
	pods := []*corev1.Pod{m.pod(0), m.pod(1), m.pod(2)}
	m.settle()
	before := m.owned()
	m.away["node-0"] = true
	m.lead()
	m.size(2)
	m.goOn(status.Grace+10*time.Second, nil)
	m.settle()
	held := m.owned()
	lone := m.shardOf(pods[0])
	require.Equal(t, "op-1-normal", lone)
	require.True(t, held[lone].Equal(before[lone]))
	require.False(t, held["op-2-normal"].Minus(before["op-2-normal"]).Empty())
	progressing := apimeta.FindStatusCondition(m.get().Status.Conditions, v1alpha1.ConditionProgressing)
	require.Contains(t, progressing.Message, "an agent that confirms which keys shard op-1-normal owns")
	m.away = map[string]bool{}
	m.settle()
	require.True(t, m.owned()["op-3-normal"].Empty())
	require.False(t, m.owned()[lone].Equal(before[lone]))
}
