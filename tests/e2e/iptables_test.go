package e2e

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

// Capture by iptables gives the same guarantees, for pods that start in this mode and for
// pods that were captured by eBPF before.
func TestIPTables(t *testing.T) {
	before := newPair(t)
	require.Equal(t, "ebpf", before.capture(t))
	ns := namespace(t, "traffic")
	probeRights(t, ns)
	h := newHosts(t, ns)
	pod := h.known(clientPodOf(ns, "client"))
	create(t, pod)
	pod = ready(t, ns, pod.Name)
	h.serve(t, pod)
	b := breaker(t, ns, "egress", `
trafficInterceptRules:
- {name: not-evil, interceptType: Blacklist, contentType: Normal, contents: [evil.example.com]}
`, 1)
	egress := func() {
		t.Helper()
		inForce(t, b, 1)
		passes(t, pod, "https://api.example.com/")
		denied(t, pod, http.StatusForbidden, ns+"/egress", "http://evil.example.com/")
		shut(t, pod, "https://evil.example.com/")
		require.Regexp(t, "^E[A-Z]+$", h.echo(t, pod, "443"))
	}
	egress()
	restore := changedAgents(t, withArgs("--capture=iptables"))
	before.a.works(t)
	before.b.works(t)
	require.Equal(t, "iptables", before.capture(t))
	egress()

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
	egress()
}

// capture returns the capture mode of the members, by their shards' status.
func (p *pair) capture(t *testing.T) string {
	t.Helper()
	a := settled(t, p.namespace, "a", 1).Status.Pods[0].Capture
	b := settled(t, p.namespace, "b", 1).Status.Pods[0].Capture
	require.Equal(t, a, b)
	return a
}
