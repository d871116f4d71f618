package e2e

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

// recovery bounds the time from an agent's restart until its members work again. Its unit is
// a reply that a member of another node gets, which takes longer on a busy machine, and at
// least pause. An idle machine needs less than a fifth of it. Members captured by address
// also wait for a Service: for a readiness probe and kube-proxy.
const recovery, serviceRecovery = int(10 * time.Second / pause), int(25 * time.Second / pause)

// An agent is killed. Until it is back, its members are refused and none of their requests
// bypasses it; then they work again.
func TestNoRequestBypassesAKilledAgent(t *testing.T) {
	newPair(t).agentKilled(t)
}

// agentKilled kills the agent of member a.
func (p *pair) agentKilled(t *testing.T) {
	t.Helper()
	struck, other := p.a.asking(t), p.b.asking(t)
	start := time.Now()
	struck.await(t, "a reply", start, isGood)
	other.await(t, "a reply", start, isGood)

	killed := time.Now() // the agent may be back before killAgent returns
	killAgent(t, p.a.Spec.NodeName)
	gone := time.Now() // what it had in hand before has no access line
	first := struck.await(t, "a refusal", killed, isRefused)
	back := struck.await(t, "a reply after the agent's return", first.at, isGood)
	started := agentStarted(t, p.a.Spec.NodeName, killed)
	meanwhile, within := other.between(started, back.at), recovery
	if p.a.Annotations[meshv1alpha1.CaptureAnnotation] == meshv1alpha1.CaptureAddress {
		within = serviceRecovery
	}
	t.Logf("the agent was down for %v, its member worked %v after its start", started.Sub(killed).Round(time.Millisecond), back.at.Sub(started).Round(time.Millisecond))
	require.LessOrEqual(t, meanwhile, within, "replies on the other node from the agent's start to its member's first reply")
	other.await(t, "a reply", back.at, isGood)

	answered, unanswered := struck.neverUnsharded(t)
	_, elsewhere := other.neverUnsharded(t)
	require.Zero(t, elsewhere, "members of another node are not affected")
	traffic, err := cluster.Traffic(t.Context(), audit.Callers{Pods: []string{p.namespace + "/a", p.namespace + "/b"}, Since: gone})
	require.NoError(t, err)
	require.NotEmpty(t, traffic.Requests)
	require.Empty(t, traffic.Leaked, never)
	t.Logf("%d replies, %d refusals (%q)", answered, unanswered, first.refused)
}
