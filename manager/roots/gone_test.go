package roots

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// A pod that ran unsharded is deleted by force: its processes act on everything until its
// agent refuses them.
func TestFirstGrantWaitsForPodsDeletedByForce(t *testing.T) {
	for name, c := range map[string]struct{ silent, end func(m *mesh, p *corev1.Pod) }{
		"until its agent confirms": {
			func(m *mesh, p *corev1.Pod) { m.deaf[string(p.UID)] = true },
			func(m *mesh, p *corev1.Pod) { delete(m.deaf, string(p.UID)) },
		},
		"until a request timeout after its agent fell silent": {
			func(m *mesh, p *corev1.Pod) { m.away[p.Spec.NodeName] = true },
			func(m *mesh, p *corev1.Pod) { m.goOn(meshv1.RequestGrace+2*time.Second, nil) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			m.root(1, 1)
			m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = new(true) })
			p := m.pod(0)
			m.settle()
			require.Nil(t, m.policies[p.UID].GetSharding(), "it acts on everything")
			c.silent(m, p)
			require.NoError(t, m.Delete(t.Context(), p))
			m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = nil })
			m.pod(1)
			m.goOn(requestTimeout, nil)
			m.shardsOwnNothing()
			require.Contains(t, m.ready().Message, "pod op-0 on node node-0, which was deleted or has ended, and may run on")
			require.NotEmpty(t, m.policies[p.UID].Refuse)
			c.end(m, p)
			m.settle()
			require.Len(t, m.held(), 1)
			require.NotContains(t, m.policies, p.UID)
		})
	}
}

// A refusal bars what the pod was sent before, so the pod is served under a later serial.
func TestMemberIsServedAgainAfterARefusal(t *testing.T) {
	m := newMesh(t)
	m.root(2, 1)
	p := m.pod(0)
	m.pod(1)
	m.settle()
	before := m.policies[p.UID].Serial
	p = get(m, p)
	p.Labels["a"] = "b"
	require.NoError(t, m.Update(t.Context(), p))
	other := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "other", UID: "other"}}
	other.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
	require.NoError(t, m.Create(t.Context(), other))
	m.settle()
	require.NotEmpty(t, m.inForce[string(p.UID)].Refuse)
	require.NoError(t, m.Delete(t.Context(), other))
	m.settle()
	require.Empty(t, m.inForce[string(p.UID)].Refuse)
	require.Equal(t, before+1, m.inForce[string(p.UID)].Serial)
	require.False(t, m.get().Status.Root.RolledBack)
	require.Len(t, m.held(), 2)
}
