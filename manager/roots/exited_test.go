package roots

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// A pod whose object is gone may run still.
func TestDeletedMemberIsKeptUntilProvenExited(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what string
		do   func(m *mesh, p *corev1.Pod)
	}{
		{"its agent refuses it", func(m *mesh, p *corev1.Pod) { delete(m.away, p.Spec.NodeName) }},
		{"its node is gone", func(m *mesh, p *corev1.Pod) {
			m.nodes[p.Spec.NodeName] = true
			m.settle()
			m.now = m.now.Add(requestTimeout + meshv1.LostWrite)
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			m, pods := sharded(t, 1)
			p := pods[0]
			m.away[p.Spec.NodeName] = true
			require.NoError(t, m.Delete(t.Context(), p))
			m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
			m.pod(1)
			m.settle()
			require.Equal(t, "op-1-normal", m.shardOf(p))
			require.NotEmpty(t, m.policies[p.UID].Refuse)
			require.True(t, m.owned()["op-2-normal"].Empty())

			m.now = m.now.Add(status.BlockedAfter + time.Second)
			require.NoError(t, m.round())
			require.NoError(t, m.round())
			blocked := 0
			for len(m.recorder.Events) > 0 {
				if e := <-m.recorder.Events; strings.HasPrefix(e, "Warning HandoverBlocked") {
					blocked++
					require.Contains(t, e, p.Name)
				}
			}
			require.Equal(t, 1, blocked)

			c.do(m, p)
			m.settle()
			require.Empty(t, m.shardOf(p))
			require.False(t, m.owned()["op-2-normal"].Empty())
		})
	}
}

// A pod may be marked as failed before its containers have ended, as PodGC does.
func TestFailedMemberIsKeptUntilProvenExited(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what string
		do   func(m *mesh, p *corev1.Pod)
	}{
		{"its agent refuses it", func(m *mesh, p *corev1.Pod) { delete(m.deaf, string(p.UID)) }},
		{"its agent has been away for long", func(m *mesh, p *corev1.Pod) {
			m.away[p.Spec.NodeName] = true
			m.settle()
			m.now = m.now.Add(requestTimeout + meshv1.LostWrite)
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			m, pods := sharded(t, 1)
			p := pods[0]
			m.deaf[string(p.UID)], m.nodes[p.Spec.NodeName] = true, true
			p = get(m, p)
			p.Status.Phase = corev1.PodFailed
			require.NoError(t, m.Status().Update(t.Context(), p))
			m.settle()
			m.now = m.now.Add(requestTimeout + meshv1.LostWrite)
			m.settle()
			require.NotEmpty(t, m.shardOf(p), "its agent is connected, and has not confirmed")
			c.do(m, p)
			m.settle()
			require.Empty(t, m.shardOf(p))
		})
	}
}

// The end of a pod is proven a request timeout after both its agent fell silent and its
// end was seen: the agent may be alive, and have let a request through until then.
func TestMemberWithoutAgentExitsARequestTimeoutLater(t *testing.T) {
	t.Parallel()
	end := map[string]func(m *mesh, p *corev1.Pod){
		"failed": func(m *mesh, p *corev1.Pod) {
			p = get(m, p)
			p.Status.Phase = corev1.PodFailed
			require.NoError(m, m.Status().Update(m.Context(), p))
		},
		"its Node is deleted": func(m *mesh, p *corev1.Pod) {
			m.nodes[p.Spec.NodeName] = true
			require.NoError(m, m.Delete(m.Context(), p))
		},
	}
	for name, end := range end {
		t.Run(name, func(t *testing.T) {
			m, pods := sharded(t, 1)
			p := pods[0]
			m.away[p.Spec.NodeName] = true
			m.later(10 * time.Minute)
			end(m, p)
			m.goOn(requestTimeout, nil)
			require.NotEmpty(t, m.shardOf(p))
			m.lead() // which has not seen the end before
			m.goOn(requestTimeout, nil)
			require.NotEmpty(t, m.shardOf(p))
			m.goOn(meshv1.LostWrite+2*time.Second, nil)
			require.Empty(t, m.shardOf(p))
		})
	}

	t.Run("deleted by force", func(t *testing.T) {
		m, pods := sharded(t, 1)
		p := pods[0]
		m.away[p.Spec.NodeName] = true
		require.NoError(t, m.Delete(t.Context(), p))
		m.later(time.Hour)
		require.NotEmpty(t, m.shardOf(p), "it runs on, on a node that exists")
	})
}
