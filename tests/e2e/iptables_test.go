package e2e

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The other way of capture keeps the same promises, for pods that start under it
// and for pods that were captured by eBPF before.
func TestIPTables(t *testing.T) {
	before := newPair(t)
	require.Equal(t, "ebpf", before.capture(t))
	restore := changedAgents(t, withArgs("--capture=iptables"))
	before.a.works(t)
	before.b.works(t)
	require.Equal(t, "iptables", before.capture(t))

	p := newPair(t)
	require.Equal(t, "iptables", p.capture(t))
	p.agentKilled(t)
	before.a.works(t)

	restore()
	for _, p := range []*pair{before, p} {
		p.a.works(t)
		p.b.works(t)
		require.Equal(t, "ebpf", p.capture(t))
	}
}

// capture is how the members are captured, by their shards' status.
func (p *pair) capture(t *testing.T) string {
	t.Helper()
	a := settled(t, p.namespace, "a", 1).Status.Pods[0].Capture
	b := settled(t, p.namespace, "b", 1).Status.Pods[0].Capture
	require.Equal(t, a, b)
	return a
}
