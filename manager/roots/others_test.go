package roots

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// heard reports whether all pods without a shard were idle since the state was read.
func (m *mesh) heard() bool {
	return m.roots[origin.Of(m.get())].stored.State.Evidence.OthersConfirmed
}

// surplus is a root of two shards with a third pod, whose agent is away when another manager
// begins to lead.
func surplus(t *testing.T, change func(*mesh, *corev1.Pod)) (*mesh, *corev1.Pod) {
	m, _ := sharded(t, 2)
	p := m.pod(2)
	change(m, p)
	m.away[p.Spec.NodeName] = true
	m.lead()
	m.settle()
	require.False(t, m.heard())
	return m, get(m, p)
}

// Between the list of pods and the policies that follow from it, a pod that is gone is in
// neither.
func TestPodThatHasJustExitedMayAct(t *testing.T) {
	t.Parallel()
	m, p := surplus(t, func(*mesh, *corev1.Pod) {})
	p.Status.Phase = corev1.PodFailed
	require.NoError(t, m.Status().Update(t.Context(), p))
	require.NoError(t, m.round())
	require.False(t, m.heard())
}

func TestPodThatNoAgentRefusedMayAct(t *testing.T) {
	t.Parallel()
	m, p := surplus(t, func(m *mesh, p *corev1.Pod) { m.conflict(p) })
	require.NotEmpty(t, m.policies[p.UID].Refuse)
	require.NoError(t, m.Delete(t.Context(), p))
	require.NoError(t, m.round())
	require.False(t, m.heard())
}

// conflict makes a pod one that another configuration selects, too.
func (m *mesh) conflict(p *corev1.Pod) (other *v1alpha1.ShardingConfig) {
	p = get(m, p)
	p.Labels["a"] = "b"
	require.NoError(m, m.Update(m.Context(), p))
	other = &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "other", UID: "other"}}
	other.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
	require.NoError(m, m.Create(m.Context(), other))
	return other
}

// Another manager serves a member under a policy that requires nothing once it has confirmed.
func TestConfirmedMemberIsNotForgotten(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 1)
	p := pods[0]
	m.lead()
	require.NoError(t, m.round())
	m.push()
	require.NotZero(t, m.policies[p.UID].RequiredSerial)
	m.settle()
	m.push()
	require.Zero(t, m.policies[p.UID].RequiredSerial)
}

// The agent of a node may have pods that the apiserver does not know.
func TestNoKeyMovesBeforeAgentsConnect(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(3, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.OnChange = v1alpha1.OnChangeRelist })
	for n := range 3 {
		m.pod(n)
	}
	m.settle()
	before := m.owned()
	m.lead()
	m.unconnected = []string{"node-9"}
	m.size(2)
	m.goOn(10*time.Second, nil)
	require.Equal(t, before, m.owned())
	m.unconnected, m.removed = nil, []push.Removed{{Node: "node-9", UID: "made-later"}}
	m.later(time.Minute)
	require.Equal(t, before, m.owned())
	m.removed = nil
	m.settle()
	require.NotEqual(t, before, m.owned())
}

// What holds back a withdrawal is in the status.
func TestWithdrawalSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	m, _ := surplus(t, func(*mesh, *corev1.Pod) {})
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = new(true) })
	m.later(time.Minute)
	require.Contains(t, m.ready().Message, "pod op-2 on node node-2")
	require.Contains(t, m.get().Status.Root.Handovers[0].WaitsFor[0], "pod op-2 on node node-2")
}

func TestDryRunReleasesBesideSurplusPods(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	m.pod(0)
	b := m.pod(1)
	m.pod(2)
	m.settle()
	m.deaf[string(b.UID)] = true
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.DryRun = true })
	m.settle()
	m.lead()
	m.settle()
	clear(m.deaf)
	m.settle()
	m.later(time.Minute)
	state, err := decide.Load(m.get().Status.Root)
	require.NoError(t, err)
	require.False(t, state.Holds())
}

// A member that its agent forgot is dropped once that is written, and not before.
func TestForgottenMemberIsRefusedUntilItsEndIsWritten(t *testing.T) {
	t.Parallel()
	m, pods, backup := moved(t)
	former := pods[2]
	require.NoError(t, m.Delete(t.Context(), former))
	m.settle()
	m.later(2 * requestTimeout)
	m.recreate(former)
	m.away[pods[0].Spec.NodeName], m.away[pods[1].Spec.NodeName] = true, true
	m.restore(backup)
	failed := false
	m.funcs.SubResourceUpdate = func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
		s, ok := o.(*v1alpha1.ShardingConfig)
		if ok && !failed && !assigned(s, former) {
			failed = true
			return errors.New("etcd is slow")
		}
		return c.SubResource(sub).Update(ctx, o, opts...)
	}
	for range 15 {
		_ = m.round() // one fails
		m.push()
		m.now = m.now.Add(time.Second)
	}
	require.True(t, failed)
	require.Empty(t, m.shardOf(former))
}

func assigned(c *v1alpha1.ShardingConfig, p *corev1.Pod) bool {
	for _, a := range c.Status.Root.Assignments {
		if a.UID == string(p.UID) {
			return true
		}
	}
	return false
}
