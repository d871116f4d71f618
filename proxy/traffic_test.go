package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/redirected"
)

// When the first rules cannot be, nobody knows which held before: what they are about of
// other hosts is refused.
func TestWithoutValidRulesEgressIsRefused(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	breakers := []*meshv1.Breaker{{Name: "bad", Rules: []*meshv1.LimitRule{{Name: "r", Key: "k", Bucket: &meshv1.Bucket{}}}}}
	bad := func(ports ...uint32) *meshv1.Traffic {
		return &meshv1.Traffic{Breakers: breakers, Egress: &meshv1.Egress{Ports: ports}}
	}
	dialed := make(chan string, 10)
	pod := m.server.Pod(PodInfo{UID: "uid-2", Namespace: "ns", Name: "other"}, func(_ context.Context, _, addr string) (net.Conn, error) {
		dialed <- addr
		return nil, errors.New("nobody there")
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() {
		_ = pod.ServeEgress(redirected.Listener{Listener: l, To: netip.MustParseAddrPort("192.0.2.1:80")})
	}()
	ask := func(what string) string {
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(soon))
		_, err = io.WriteString(c, what)
		require.NoError(t, err)
		b, _ := io.ReadAll(c)
		return string(b)
	}
	const request = "GET / HTTP/1.1\r\nHost: a.example.com\r\nConnection: close\r\n\r\n"
	set := func(traffic *meshv1.Traffic) (*meshv1.Traffic, error) {
		applied, err := pod.Apply(&meshv1.PodPolicy{Uid: "uid-2", Version: "v", Traffic: traffic})
		require.NoError(t, err)
		return applied.Rules, applied.Problem
	}
	for _, ports := range [][]uint32{{80}, {80, 81}} {
		rules, problem := set(bad(ports...))
		require.ErrorContains(t, problem, "connections to other hosts are refused")
		require.ErrorContains(t, problem, `CircuitBreaker "bad"`)
		require.Equal(t, ports, rules.GetEgress().GetPorts(), "they are redirected, lest connections go around")
		said := ask(request)
		require.Contains(t, said, "403 Forbidden")
		require.Contains(t, said, "could not be applied")
		require.Empty(t, ask("SSH-2.0-client\r\n"))
	}
	_, err = pod.resettle()
	require.NoError(t, err)
	require.Contains(t, ask(request), "403 Forbidden")
	_, err = pod.Apply(&meshv1.PodPolicy{Uid: "uid-2", Version: "v", Refuse: "for a test"})
	require.NoError(t, err)
	require.Contains(t, ask(request), "403 Forbidden", "it says nothing of rules")
	require.Empty(t, dialed)

	rules, problem := set(&meshv1.Traffic{Breakers: breakers})
	require.ErrorContains(t, problem, "no rules are in force")
	require.Nil(t, rules.GetEgress(), "these are about no other host")
	if c, err := net.Dial("tcp", l.Addr().String()); err == nil { // it may be reset by then
		defer c.Close()
	}
	require.Equal(t, "192.0.2.1:80", <-dialed, "so that what comes passes")

	_, problem = set(&meshv1.Traffic{Egress: &meshv1.Egress{Ports: []uint32{80}}})
	require.NoError(t, problem)
	rules, problem = set(bad(81))
	require.ErrorContains(t, problem, "the last good ones stay in force")
	require.Equal(t, []uint32{80}, rules.GetEgress().GetPorts(), "now there are good ones")
	require.Contains(t, ask(request), "502")
}

// No request is decided about by rules that have not yet imported what another proxy exported.
func TestImportedCountsApplyBeforeRequests(t *testing.T) {
	t.Parallel()
	rules := func() *meshv1.Traffic {
		return &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cap", Rules: named([]*meshv1.LimitRule{{Bucket: bucket(1)}})}}}
	}
	old := newMesh(t, &recorder{})
	old.traffic(rules())
	require.Equal(t, 200, old.do("GET", deployment, "").StatusCode)
	require.Equal(t, 429, old.do("GET", deployment, "").StatusCode)
	data, err := old.pod.ExportTraffic()
	require.NoError(t, err)

	next := newMesh(t, &recorder{}).pod
	require.NoError(t, next.ImportTraffic(data))
	before := next.env.Policy.Load()
	// Block what is enforced last.
	blocked, release := make(chan struct{}), make(chan struct{})
	next.env.Rules.Histories.Of(schema.GroupResource{Resource: "pods"}, time.Minute)
	go next.env.Rules.Histories.Forget(func(schema.GroupResource) bool {
		close(blocked)
		<-release
		return true
	})
	<-blocked
	done := make(chan error, 1)
	go func() {
		_, err := next.Apply(&meshv1.PodPolicy{Uid: "uid-1", Version: "v", Traffic: rules()})
		done <- err
	}()
	require.Eventually(t, func() bool {
		states := next.RuleStates()
		return len(states) == 1 && states[0].State == meshv1.BreakerState_BREAKER_OPENED
	}, soon, time.Millisecond)
	during := next.env.Policy.Load()
	close(release)
	require.NoError(t, <-done)
	require.Same(t, before, during)
	require.NotSame(t, before, next.env.Policy.Load())
}
