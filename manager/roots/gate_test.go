package roots

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// outside makes a pod of the workload without the label of the mesh.
func (m *mesh) outside(ordinal int) *corev1.Pod {
	p := m.pod(ordinal)
	delete(p.Labels, v1alpha1.EnableProxyLabel)
	delete(p.Annotations, v1alpha1.TrustAnnotation)
	require.NoError(m, m.Update(m.Context(), p))
	return p
}

// lead makes a pod outside the mesh the holder of a lock, or lets it renew.
func (m *mesh) acquires(identity, name string) {
	seconds, at := int32(15), metav1.NewMicroTime(m.now)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
	err := m.Get(m.Context(), client.ObjectKeyFromObject(lease), lease)
	require.NoError(m, client.IgnoreNotFound(err))
	lease.Spec.HolderIdentity, lease.Spec.LeaseDurationSeconds, lease.Spec.RenewTime = &identity, &seconds, &at
	if err != nil {
		require.NoError(m, m.Create(m.Context(), lease))
		return
	}
	require.NoError(m, m.Update(m.Context(), lease))
}

// goOn lets time pass while pods outside the mesh renew what they hold.
func (m *mesh) goOn(d time.Duration, renew func()) {
	m.Helper()
	for end := m.now.Add(d); m.now.Before(end); m.now = m.now.Add(time.Second) {
		if renew != nil {
			renew()
		}
		require.NoError(m, m.round())
		m.push()
	}
}

// later lets time pass in larger steps.
func (m *mesh) later(d time.Duration) {
	m.Helper()
	for end := m.now.Add(d); m.now.Before(end); m.now = m.now.Add(5 * time.Second) {
		require.NoError(m, m.round())
		m.push()
	}
}

func (m *mesh) ready() metav1.Condition {
	return *apimeta.FindStatusCondition(m.get().Status.Conditions, v1alpha1.ConditionReady)
}

func (m *mesh) shardsOwnNothing() {
	m.Helper()
	state, err := decide.Load(m.get().Status.Root)
	require.NoError(m, err)
	require.False(m, state.Holds())
}

// tally-1 is replaced by a labelled pod while tally-0 leads outside the mesh: a rolling
// update that is left half way.
func TestNothingIsGrantedWhileTheLockIsHeldOutside(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	old := m.outside(0)
	m.pod(1)
	renew := func() { m.acquires("op-0_4711", "lock") }
	m.goOn(2*time.Minute, renew)
	m.shardsOwnNothing()
	require.EqualValues(t, v1alpha1.ReasonHeldOutside, m.ready().Reason)
	require.Contains(t, m.ready().Message, `lock ns/lock is held outside the mesh by "op-0_4711" (pod op-0)`)
	require.Equal(t, "op-0_4711", m.get().Status.Locks[0].Holder)
	for _, p := range m.policies {
		require.True(t, p.GetSharding().GetStandby())
	}

	// It crashes, and starts again: nobody else could do its shard's work.
	m.goOn(time.Minute, nil)
	m.shardsOwnNothing()
	require.EqualValues(t, v1alpha1.ReasonOutsidePods, m.ready().Reason)
	require.Contains(t, m.ready().Message, "op-0, and shard op-1-normal has no ready pod in standby")
	require.Equal(t, "op-0_4711", m.holder("lock"), "an outside pod may lead again")

	// The rolling update goes on.
	m.goOn(10*time.Second, renew)
	require.NoError(t, m.Delete(t.Context(), old))
	m.pod(0)
	m.goOn(10*time.Second, nil)
	m.shardsOwnNothing()
	m.goOn(10*time.Second, nil)
	require.Len(t, m.owned(), 2)
	require.Equal(t, "ctrlmesh:ns/op", m.holder("lock"))
	require.True(t, m.get().Status.Locks[0].HeldByMesh)
	m.goOn(time.Minute, nil)
	require.Equal(t, metav1.ConditionTrue, m.ready().Status, m.ready().Message)
}

// The label first, the root afterwards: pods were admitted to trust both CAs, and one
// of them leads unsharded.
func TestPodsLabelledBeforeTheRootAreReplaced(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	for n := range 2 {
		p := m.pod(n)
		p.Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth
		require.NoError(t, m.Update(t.Context(), p))
	}
	m.push()
	m.acquires("op-0_4711", "lock")
	m.root(2, 1)
	for range 3 {
		m.goOn(30*time.Second, nil)
		m.replace(2)
	}
	m.settle()
	require.Len(t, m.owned(), 2)
	for _, p := range m.world().Pods {
		require.Equal(t, v1alpha1.TrustMesh, p.Annotations[v1alpha1.TrustAnnotation])
		require.NotEmpty(t, m.shardOf(p))
	}
}

// An operator without locks acts wherever it runs.
func TestNothingIsGrantedBesidePodsOutsideWithoutLocks(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Controller = nil })
	old := m.outside(0)
	m.pod(1)
	m.goOn(time.Minute, nil)
	m.shardsOwnNothing()
	require.EqualValues(t, v1alpha1.ReasonOutsidePods, m.ready().Reason)
	require.Contains(t, m.ready().Message, "op-0")

	old.Status.Phase = corev1.PodFailed
	require.NoError(t, m.Status().Update(t.Context(), old))
	m.goOn(10*time.Second, nil)
	divided := m.owned()
	require.Len(t, divided, 2)
	require.NoError(t, m.Delete(t.Context(), old))

	// The template loses the label, and gets it back.
	later := m.outside(0)
	m.goOn(outsideRarely+10*time.Second, nil)
	m.shardsOwnNothing()
	require.EqualValues(t, v1alpha1.ReasonOutsidePods, m.ready().Reason)
	require.NoError(t, m.Delete(t.Context(), later))
	m.goOn(10*time.Second, nil)
	require.Equal(t, divided, m.owned())
}

// Behind Kridge's proxy, pods lead under the locks of their shards, so that the operator's lock
// is free.
func TestNothingIsGrantedBesidePodsBehindKridge(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.Client = serve.Client{Client: m.Client}
	m.lead()
	config := &kridge.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op", UID: "root", Generation: 1},
		Spec: kridge.ShardingConfigSpec{
			Controller: &kridge.ControllerConfiguration{LeaderElectionName: "lock"},
			Root: &kridge.RootConfig{
				Prefix: "op", TargetStatefulSet: "op", Auto: &kridge.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
				ResourceSelector: []kridge.ObjectLimiter{{RelateResources: []kridge.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}}},
			},
		},
	}
	require.NoError(t, m.Create(t.Context(), config))
	holds := func() bool {
		require.NoError(t, m.Get(t.Context(), client.ObjectKeyFromObject(config), config))
		state, err := decide.Load(config.Status.Root)
		require.NoError(t, err)
		return state.Holds()
	}
	old := m.outside(2)
	m.pod(0)
	m.pod(1)
	m.goOn(time.Minute, nil)
	require.Equal(t, "ctrlmesh:ns/op", m.holder("lock"))
	require.False(t, holds())
	require.EqualValues(t, v1alpha1.ReasonOutsidePods, apimeta.FindStatusCondition(config.Status.Conditions, v1alpha1.ConditionReady).Reason)

	require.NoError(t, m.Delete(t.Context(), old))
	m.goOn(time.Minute, nil)
	require.True(t, holds())
}

// A lock in another namespace is not named: pods show it when they contend for it.
func TestDiscoveredLockKeepsTheGateClosed(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Controller = nil })
	m.acquires("elsewhere_1", "found")
	p := m.pod(0)
	m.observed[string(p.UID)] = []push.ObservedLock{{Namespace: "ns", Name: "found", Resource: "leases", Holder: "elsewhere_1", Written: true}}
	renew := func() { m.acquires("elsewhere_1", "found") }
	// It is seen in standby already, before anything is granted.
	m.deaf[string(p.UID)] = true
	m.goOn(time.Second, renew)
	m.seen[string(p.UID)] = push.Observation{Reported: true, Capture: v1alpha1.CaptureEBPF, Version: "older", LockReport: push.LockReport{ObservedLocks: m.observed[string(p.UID)]}}
	m.goOn(2*time.Second, renew)
	delete(m.deaf, string(p.UID))
	m.goOn(time.Minute, renew)
	m.shardsOwnNothing()
	require.EqualValues(t, v1alpha1.ReasonHeldOutside, m.ready().Reason)
	require.True(t, m.get().Status.Locks[0].Discovered)
	require.Equal(t, "found", m.policies[p.UID].Sharding.Locks[0].UpstreamName, "it is read as it is")

	m.lead() // it is not forgotten
	m.observed = map[string][]push.ObservedLock{}
	m.goOn(time.Minute, nil)
	require.Len(t, m.owned(), 1)
	require.Equal(t, "found---op-1-normal", m.policies[p.UID].Sharding.Locks[0].UpstreamName)
}

// A lock that shows later may be held outside: members do not lead under it before the
// mesh holds it, and keep what they own.
func TestLockDiscoveredLateKeepsOwners(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 1)
	p := pods[0]
	m.owned()
	renew := func() { m.acquires("elsewhere_1", "late") }
	renew()
	m.observed[string(p.UID)] = []push.ObservedLock{{Namespace: "ns", Name: "late", Resource: "leases", Written: true}}
	m.goOn(time.Minute, renew)
	m.owned()
	require.Len(t, m.policies[p.UID].Sharding.Locks, 1)
	require.EqualValues(t, v1alpha1.ReasonHeldOutside, m.ready().Reason)
	require.Contains(t, m.ready().Message, "elsewhere_1")
	m.goOn(30*time.Second, nil)
	require.Len(t, m.policies[p.UID].Sharding.Locks, 2)
	require.Equal(t, "ctrlmesh:ns/op", m.holder("late"))
	require.Equal(t, metav1.ConditionTrue, m.ready().Status, m.ready().Message)
}

// A leader for life owns its lock, a ConfigMap without a record, as long as its pod exists.
func TestNothingIsGrantedBesideALeaderForLife(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	old := m.outside(2)
	lock := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lock",
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: old.Name, UID: old.UID}}}}
	require.NoError(t, m.Create(t.Context(), lock))
	m.pod(0)
	m.pod(1)
	m.goOn(5*time.Minute, nil)
	m.shardsOwnNothing()
	require.EqualValues(t, v1alpha1.ReasonHeldOutside, m.ready().Reason)
	require.Contains(t, m.ready().Message, old.Name)
	require.NoError(t, m.Delete(t.Context(), old))
	require.NoError(t, m.Delete(t.Context(), lock))
	m.goOn(time.Minute, nil)
	require.Len(t, m.owned(), 2)
}

func TestNoMoreLocksAreDiscoveredThanTheBound(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	p := m.pod(0)
	for i := range meshv1.MaxLocks {
		m.observed[string(p.UID)] = append(m.observed[string(p.UID)], push.ObservedLock{Namespace: "ns", Name: fmt.Sprintf("lock-%d", i), Resource: "leases", Written: true})
	}
	m.goOn(10*time.Second, nil)
	require.Len(t, m.get().Status.Locks, meshv1.MaxLocks, "the named one, and others")
	require.EqualValues(t, v1alpha1.ReasonUnknownLock, m.ready().Reason)
	require.Contains(t, m.ready().Message, fmt.Sprintf("lock-%d", meshv1.MaxLocks-1))
}

// Under disable the lock is released once no member acts, and acquired again before
// anything is granted anew.
func TestLockIsReleasedUnderDisable(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	a := pods[0]
	require.Equal(t, "ctrlmesh:ns/op", m.holder("lock"))
	m.deaf[string(a.UID)] = true
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = new(true) })
	m.goOn(time.Minute, nil)
	require.Equal(t, "ctrlmesh:ns/op", m.holder("lock"), "a may act on what it owned")
	delete(m.deaf, string(a.UID))
	m.goOn(5*time.Second, nil)
	require.Empty(t, m.holder("lock"))

	m.acquires("op-1_4711", "lock")
	renew := func() { m.acquires("op-1_4711", "lock") }
	m.goOn(time.Minute, renew)
	m.replace(2)
	m.goOn(time.Minute, renew)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = nil })
	m.goOn(time.Minute, renew)
	m.shardsOwnNothing()
	for range 4 {
		m.goOn(30*time.Second, nil)
		m.replace(2)
	}
	require.Len(t, m.owned(), 2)
}

// An earlier version granted shards without holding the lock: members keep theirs.
func TestUpgradeKeepsLocksOfMembers(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 1)
	p := pods[0]
	c := m.get()
	c.Status.Locks = nil
	require.NoError(t, m.Status().Update(t.Context(), c))
	m.lead()
	require.NoError(t, m.Delete(context.Background(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lock"}}))
	renew := func() { m.acquires("outside_1", "lock") }
	m.goOn(time.Minute, renew)
	m.owned()
	require.Equal(t, "lock---op-1-normal", m.policies[p.UID].Sharding.Locks[0].UpstreamName)
	m.goOn(time.Minute, nil)
	require.True(t, m.get().Status.Locks[0].HeldByMesh)
	require.Equal(t, "lock---op-1-normal", m.policies[p.UID].Sharding.Locks[0].UpstreamName)
}

// A shard whose pods are ready and do not lead does nothing. That is said within a minute.
func TestShardWithoutLeaderIsReported(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	a, b := pods[0], pods[1]
	m.goOn(time.Minute, nil)
	require.Equal(t, metav1.ConditionTrue, m.ready().Status, m.ready().Message)
	require.Equal(t, a.Name, m.get().Status.Root.Shards[0].Leader)
	require.False(t, apimeta.IsStatusConditionTrue(m.get().Status.Conditions, v1alpha1.ConditionLeaderMissing))

	m.idle[string(b.UID)] = true
	m.goOn(20*time.Second, nil)
	require.Equal(t, metav1.ConditionTrue, m.ready().Status, "others may just take over")
	m.acquires("op-1_before", "lock---op-2-normal")
	m.goOn(20*time.Second, nil)
	missing := apimeta.FindStatusCondition(m.get().Status.Conditions, v1alpha1.ConditionLeaderMissing)
	require.Equal(t, metav1.ConditionTrue, missing.Status)
	require.Equal(t, metav1.ConditionFalse, m.ready().Status)
	require.Equal(t, "shard op-2-normal has no leader: none of its 1 ready pods holds lock ns/lock---op-2-normal, which op-1_before holds", missing.Message)
	require.Contains(t, <-warnings(m), missing.Message)
	m.idle[string(a.UID)] = true
	m.goOn(40*time.Second, nil)
	require.Contains(t, <-warnings(m), "shard op-1-normal has no leader", "another shard, another Event")
	delete(m.idle, string(a.UID))
	m.goOn(2*time.Second, nil)

	// They wait for another lock.
	m.observed[string(b.UID)] = []push.ObservedLock{{Namespace: "kube-system", Name: "real", Resource: "leases", Holder: "somebody"}}
	m.goOn(2*time.Second, nil)
	require.EqualValues(t, v1alpha1.ReasonUnknownLock, m.ready().Reason)
	require.Contains(t, m.ready().Message, `wait for lock kube-system/real, which "somebody" holds`)

	delete(m.idle, string(b.UID))
	m.goOn(2*time.Second, nil)
	require.Equal(t, metav1.ConditionTrue, m.ready().Status, m.ready().Message)

	// Keys without a working owner are said as well.
	p := get(m, b)
	p.Status.Conditions[0].Status = corev1.ConditionFalse
	require.NoError(t, m.Status().Update(t.Context(), p))
	m.goOn(40*time.Second, nil)
	require.Equal(t, "NoReadyMember", m.ready().Reason)
}

// warnings are the Events that warn of shards without leader.
func warnings(m *mesh) <-chan string {
	out := make(chan string, 100)
	for len(m.recorder.Events) > 0 {
		if e := <-m.recorder.Events; strings.HasPrefix(e, "Warning LeaderMissing") {
			out <- e
		}
	}
	require.Len(m, out, 1)
	return out
}

// leasedFor makes a pod the holder of a lock with a lease of that duration.
func (m *mesh) leasedFor(identity, name string, seconds int32) {
	m.acquires(identity, name)
	lease := &coordinationv1.Lease{}
	require.NoError(m, m.Get(m.Context(), client.ObjectKey{Namespace: "ns", Name: name}, lease))
	lease.Spec.LeaseDurationSeconds = &seconds
	require.NoError(m, m.Update(m.Context(), lease))
}

// An operator with a lease of 137 s, renewed every 26 s and not released on exit: members
// only read the lock until that lease ends.
func TestLockWithLongLeaseIsDiscoveredFromReads(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Controller = nil })
	old := m.outside(1)
	m.leasedFor("op-1_4711", "slow", 137)
	renewed := m.now
	renew := func() {
		if m.now.Sub(renewed) >= 26*time.Second {
			renewed = m.now
			m.leasedFor("op-1_4711", "slow", 137)
		}
	}
	p := m.pod(0)
	m.observed[string(p.UID)] = []push.ObservedLock{{Namespace: "ns", Name: "slow", Resource: "leases", Holder: "op-1_4711"}}
	m.goOn(5*time.Second, renew)
	require.Len(t, m.get().Status.Locks, 1)
	require.True(t, m.get().Status.Locks[0].Discovered)
	require.EqualValues(t, v1alpha1.ReasonHeldOutside, m.ready().Reason)
	m.goOn(2*time.Minute, renew)
	m.shardsOwnNothing()
	require.NotContains(t, m.ready().Message, "does not renew")

	require.NoError(t, m.Delete(t.Context(), old))
	m.goOn(70*time.Second, nil)
	m.shardsOwnNothing()
	require.Contains(t, m.ready().Message, `lock ns/slow is held outside the mesh by "op-1_4711" (pod op-1), which does not renew it: its lease ends at `+
		renewed.Add(137*time.Second).UTC().Format(time.RFC3339))
	m.goOn(renewed.Add(135*time.Second).Sub(m.now), nil)
	m.shardsOwnNothing()
	m.goOn(8*time.Second, nil)
	require.Len(t, m.owned(), 1)
	require.Equal(t, "ctrlmesh:ns/op", m.holder("slow"))
	require.Equal(t, "slow---op-1-normal", m.policies[p.UID].Sharding.Locks[0].UpstreamName)
}

// Others' locks are commonly read as well.
func TestReadLockOfAnotherWorkloadIsNotDiscovered(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	p := m.pod(0)
	for _, holder := range []string{"other-0_1", "op-other-0_1", "op_1", "op-0a_1", "somebody"} {
		m.observed[string(p.UID)] = append(m.observed[string(p.UID)], push.ObservedLock{Namespace: "ns", Name: "read-" + holder, Resource: "leases", Holder: holder})
	}
	m.goOn(5*time.Second, nil)
	require.Len(t, m.get().Status.Locks, 1)
	require.False(t, m.get().Status.Locks[0].Discovered)
}

// The first lock of an operator may show after its shards were given their keys.
func TestFirstLockDiscoveredLateKeepsOwners(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Controller = nil })
	p := m.pod(0)
	m.settle()
	m.owned()
	m.leasedFor("custom identity", "late", 137)
	m.observed[string(p.UID)] = []push.ObservedLock{{Namespace: "ns", Name: "late", Resource: "leases", Holder: "custom identity", Written: true}}
	m.goOn(time.Minute, nil)
	m.owned()
	require.Empty(t, m.policies[p.UID].Sharding.Locks)
	require.EqualValues(t, v1alpha1.ReasonHeldOutside, m.ready().Reason)
	m.goOn(time.Minute+20*time.Second, nil)
	require.Equal(t, "ctrlmesh:ns/op", m.holder("late"))
	require.Equal(t, "late---op-1-normal", m.policies[p.UID].Sharding.Locks[0].UpstreamName)
}

// An agent that does not know standby is sent no policy with it. The status names its node.
func TestNothingIsGrantedUnderAnOlderAgent(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	p := m.pod(0)
	uid := string(p.UID)
	m.deaf[uid] = true
	m.goOn(2*time.Second, nil)
	m.seen[uid] = push.Observation{Reported: true, Capture: v1alpha1.CaptureEBPF, Nacked: m.policies[p.UID].Version, Nack: "upgrade the agent of node node-0"}
	m.goOn(time.Minute, nil)
	m.shardsOwnNothing()
	require.Contains(t, m.ready().Message, "upgrade the agent of node node-0")

	delete(m.deaf, uid)
	m.settle()
	require.Len(t, m.owned(), 1)
}
