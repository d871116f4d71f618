package roots

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// restore makes the status of the root that of a backup, and another manager the leader.
func (m *mesh) restore(backup v1alpha1.ShardingConfigStatus) {
	c := m.get()
	c.Status = backup
	require.NoError(m, m.Status().Update(m.Context(), c))
	m.restoreLock()
	m.lead()
}

// restoreLock makes the lock that of a backup, in the mesh's name.
func (m *mesh) restoreLock() {
	l := &coordinationv1.Lease{}
	require.NoError(m, m.Get(m.Context(), types.NamespacedName{Namespace: "ns", Name: "lock"}, l))
	at := metav1.NewMicroTime(m.now.Add(-10 * time.Minute))
	l.Spec.RenewTime = &at
	require.NoError(m, m.Update(m.Context(), l))
}

// locksProven is how long a manager must hold a lock that it found in the mesh's name.
const locksProven = 130 * time.Second

// The Lease of a restored backup bears the mesh's name, while a pod outside the mesh may lead
// that acquired it since. No first key is granted by that name.
func TestRestoredLockGrantsNothing(t *testing.T) {
	t.Parallel()
	m, _ := sharded(t, 1)
	c := m.get()
	c.Status.Root = nil // as in a backup from before the first grant
	require.NoError(t, m.Status().Update(t.Context(), c))
	m.floors, m.seen = map[string]int64{}, map[string]push.Observation{}
	m.restoreLock()
	m.lead()
	m.goOn(locksProven-20*time.Second, nil)
	m.shardsOwnNothing()
	m.goOn(20*time.Second, nil)
	require.Len(t, m.owned(), 1)
}

// moved is a root of three shards, a backup of it, and what happened since: the third shard
// was withdrawn, so the others own its keys.
func moved(t *testing.T) (m *mesh, pods []*corev1.Pod, backup v1alpha1.ShardingConfigStatus) {
	m = newMesh(t)
	m.root(3, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.OnChange = v1alpha1.OnChangeRelist })
	for n := range 3 {
		pods = append(pods, m.pod(n))
	}
	m.settle()
	backup = m.get().Status
	m.size(2)
	m.settle()
	require.True(t, m.owned()["op-3-normal"].Empty())
	return m, pods, backup
}

func (m *mesh) size(shards int32) {
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = shards })
}

// Keys moved after a backup of etcd was made. By the restored status their former shard
// owns them, so its pods act on them again, or hand them over to another.
func TestRestoredBackupGivesNoKeyASecondOwner(t *testing.T) {
	t.Parallel()
	for name, silent := range map[string]int{"no agent is silent": 3, "a present owner is silent": 0, "the former owner is silent": 2} {
		t.Run(name, func(t *testing.T) {
			m, pods, backup := moved(t)
			if silent < len(pods) {
				m.away[pods[silent].Spec.NodeName] = true
			}
			m.restore(backup)
			m.size(4)
			m.pod(3)
			m.settle()
			clear(m.away)
			m.settle()
			m.later(locksProven)
			m.settle()
			require.Len(t, m.owned(), 4)
			require.False(t, m.get().Status.Root.RolledBack)
			for _, p := range pods {
				require.NotEmpty(t, m.shardOf(p))
			}
			warned := 0
			for len(m.recorder.Events) > 0 {
				if e := <-m.recorder.Events; strings.HasPrefix(e, "Warning RolledBack") {
					warned++
				}
			}
			require.Equal(t, 1, warned)
		})
	}
}

// recreate restores a pod that was deleted after a backup was made. Its agent forgot it.
func (m *mesh) recreate(p *corev1.Pod) {
	uid := string(p.UID)
	delete(m.floors, uid)
	delete(m.seen, uid)
	delete(m.inForce, uid)
	p = p.DeepCopy()
	p.ResourceVersion = ""
	require.NoError(m, m.Create(m.Context(), p))
}

// A member that was deleted after the backup exists again, and its kubelet starts it. Its
// agent has forgotten which policies the pod had.
func TestRestoredMemberThatItsAgentForgot(t *testing.T) {
	t.Parallel()
	for name, away := range map[string]bool{"the present owners are connected": false, "they are not": true} {
		t.Run(name, func(t *testing.T) {
			m, pods, backup := moved(t)
			former := pods[2]
			require.NoError(t, m.Delete(t.Context(), former))
			m.settle()
			m.later(2 * requestTimeout)
			require.Empty(t, m.shardOf(former))
			m.recreate(former)
			m.away[pods[0].Spec.NodeName], m.away[pods[1].Spec.NodeName] = away, away
			m.restore(backup)
			m.settle()
			m.later(locksProven)
			clear(m.away)
			m.settle()
			m.later(locksProven)
			m.settle()
			require.Len(t, m.owned(), 2)
			require.Empty(t, m.shardOf(former))
			m.size(3)
			m.settle()
			require.Len(t, m.owned(), 3)
			require.Equal(t, "op-3-normal", m.shardOf(former))
		})
	}
}

// A pod that was made after the backup has no object any more, and its process runs on. Its
// agent reports to the manager that it is there.
func TestRestoredRootWaitsForPodsWithoutObject(t *testing.T) {
	t.Parallel()
	for name, grant := range map[string]bool{"before a first grant": true, "before a member joins again": false} {
		t.Run(name, func(t *testing.T) {
			m, pods, backup := moved(t)
			if grant {
				backup.Root = nil
			}
			for _, p := range pods {
				require.NoError(t, m.Delete(t.Context(), p))
			}
			m.settle()
			m.later(2 * requestTimeout)
			for _, p := range pods {
				m.recreate(p)
			}
			m.removed = []push.Removed{{Node: "node-9", UID: "made-later"}}
			m.restore(backup)
			m.size(3)
			m.settle()
			m.later(locksProven)
			for _, p := range pods {
				s := m.inForce[string(p.UID)].GetSharding()
				require.True(t, s.GetStandby() || m.inForce[string(p.UID)].Refuse != "", s)
			}
			if grant {
				require.Contains(t, m.ready().Message, "made-later")
			}
			m.removed = []push.Removed{{Node: "node-9", Namespace: "another", UID: "another"}}
			m.settle()
			m.later(time.Minute)
			require.Len(t, m.owned(), 3)
		})
	}
}

// The agent of a member that joined just before another manager led may not have got its
// policy. The pod joins again, and nothing is rolled back.
func TestMemberWithoutPolicyJoinsAgain(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	a := m.pod(0)
	m.settle()
	b := m.pod(1)
	for m.shardOf(b) == "" {
		require.NoError(t, m.round())
		if m.shardOf(b) == "" {
			m.push()
		}
	}
	m.lead()
	for range 5 {
		m.settle()
	}
	require.Equal(t, "op-1-normal", m.shardOf(a))
	require.Equal(t, "op-2-normal", m.shardOf(b))
	require.Equal(t, m.policies[b.UID].Version, m.inForce[string(b.UID)].Version)
	require.NotEmpty(t, m.inForce[string(b.UID)].GetSharding().GetLimits())
	m.notRolledBack()
}

// Members are in standby until all have confirmed that they act on nothing.
func TestRestoredRootWaitsForAllMembers(t *testing.T) {
	t.Parallel()
	m, pods, backup := moved(t)
	a, b := pods[0], pods[1]
	m.restore(backup)
	m.deaf[string(a.UID)] = true
	m.settle()
	root := m.get().Status.Root
	require.True(t, root.RolledBack)
	require.EqualValues(t, v1alpha1.ReasonRolledBack, m.ready().Reason, m.ready().Message)
	require.True(t, m.inForce[string(b.UID)].GetSharding().GetStandby())
	require.Greater(t, m.inForce[string(b.UID)].Serial, uint64(0))
	delete(m.deaf, string(a.UID))
	m.settle()
	require.False(t, m.get().Status.Root.RolledBack)
	m.shardsOwnNothing()
	require.Contains(t, m.ready().Message, "lock ns/lock is in the mesh's name, but this manager has not acquired it")
	m.later(locksProven)
	require.Len(t, m.owned(), 2)
	require.Greater(t, m.get().Status.Root.Shards[0].Serial, root.MinSerial)
}

// An acknowledgement counts for the policy that was sent alone, not for another of the same
// serial.
func TestAckOfAnotherPolicyDoesNotCount(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 1)
	a := pods[0]
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	m.pod(1)
	m.deaf[string(a.UID)] = true
	m.settle()
	require.Equal(t, "Releasing", m.get().Status.Root.Handovers[0].Phase)
	o := m.seen[string(a.UID)]
	sent := m.policies[a.UID]
	o.Serial, o.Version = int64(sent.Serial), sent.Version[:strings.Index(sent.Version, "-")]+"-0123456789abcdef"
	m.seen[string(a.UID)] = o
	m.settle()
	require.Len(t, m.get().Status.Root.Handovers, 1, "it acknowledged what it was sent before a restore")
	o.Version = sent.Version
	m.seen[string(a.UID)] = o
	m.inForce[string(a.UID)] = sent
	m.settle()
	require.Empty(t, m.get().Status.Root.Handovers)
}

// A member that is refused acts on nothing: the root does not wait for it to be served again.
func TestRestoredRootDoesNotWaitForRefusedMembers(t *testing.T) {
	t.Parallel()
	m, pods, backup := moved(t)
	p := pods[0]
	other := m.conflict(p)
	m.restore(backup)
	m.deaf[string(pods[1].UID)] = true
	m.settle()
	require.True(t, m.get().Status.Root.RolledBack)
	require.EqualValues(t, v1alpha1.ReasonRolledBack, m.ready().Reason, m.ready().Message)
	delete(m.deaf, string(pods[1].UID))
	m.settle()
	require.False(t, m.get().Status.Root.RolledBack)
	require.NotEmpty(t, m.inForce[string(p.UID)].Refuse)
	require.NoError(t, m.Delete(t.Context(), other))
	m.later(locksProven)
	m.settle()
	require.NotEmpty(t, m.shardOf(p))
	require.Empty(t, m.inForce[string(p.UID)].Refuse)
	require.Len(t, m.owned(), 2)
}

// The watch of a manager may show a spec for a while that a restore undid. The status does
// not say that the restored spec was observed, whose generation is an earlier one.
func TestGenerationOfARestoredSpecIsNotObserved(t *testing.T) {
	t.Parallel()
	m, _ := sharded(t, 2)
	before := m.get()
	m.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Canary = &v1alpha1.CanaryConfig{InNamespaces: []string{"blue"}}
	})
	stale := m.world()

	c := m.get()
	c.Spec, c.Generation = before.Spec, before.Generation
	require.NoError(t, m.Update(t.Context(), c))
	_ = m.Round(t.Context(), stale) // the first reads its object again
	require.NoError(t, m.Round(t.Context(), stale))
	s := m.get().Status
	require.Zero(t, s.ObservedGeneration)
	for _, c := range s.Conditions {
		require.Zero(t, c.ObservedGeneration, c.Type)
	}

	m.settle()
	require.Equal(t, before.Generation, m.get().Status.ObservedGeneration)
}
