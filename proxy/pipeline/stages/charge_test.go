package stages

import (
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

func TestUpgradesAreRead(t *testing.T) {
	const exec, pods = "/api/v1/namespaces/a/pods/b/exec", "/api/v1/namespaces/a/pods?watch=1"
	upgrade := func(protocols ...string) []string {
		out := []string{"Connection", "Upgrade"}
		for _, p := range protocols {
			out = append(out, "Upgrade", p)
		}
		return out
	}
	m := newPod(t)
	m.policy(nil)
	for _, c := range []struct {
		method, target, body string
		header               []string
		want                 string // protocol; "refused"
	}{
		{"POST", exec, "", nil, ""},
		{"POST", exec, "", upgrade("SPDY/3.1"), "SPDY/3.1"},
		{"GET", exec, "", upgrade("websocket"), "websocket"},
		{"GET", "/api/v1/namespaces/a/pods/b/log", "", upgrade("websocket"), "websocket"},
		{"GET", pods, "", upgrade("websocket"), ""}, // answered by HTTP
		{"POST", pods, "", upgrade("websocket"), "refused"},
		{"GET", pods, "", upgrade("SPDY/3.1"), "refused"},
		{"POST", exec, "", upgrade("h2c"), "refused"},
		{"POST", exec, "", upgrade("SPDY/3.1, h2c"), "refused"},
		{"POST", exec, "", upgrade("SPDY/3.1", "h2c"), "refused"},
		{"POST", exec, "abc", upgrade("SPDY/3.1"), "refused"},
		{"POST", exec, "", []string{"Upgrade", "SPDY/3.1"}, "refused"},
		{"POST", exec, "", []string{"Connection", "Upgrade"}, "refused"},
		{"POST", "/apis/example.com/v1/namespaces/a/pods/b/exec", "", upgrade("websocket"), "refused"},
		{"GET", "/version", "", upgrade("h2c"), "refused"},
		{"GET", "/version", "", upgrade("websocket"), "refused"},
	} {
		x := m.state(c.method, c.target, c.body, c.header...)
		a := m.decide(x)
		if c.want == "refused" {
			require.Equal(t, 400, a.code, "%+v", c)
			require.Equal(t, meshv1.RefusedUpgrade, a.reason)
			continue
		}
		require.Equal(t, 200, a.code, "%+v: %s", c, a.body)
		require.Equal(t, c.want, x.Protocol, "%+v", c)
		require.Empty(t, m.last().Header.Get("Upgrade"), "%+v", c)
		require.Empty(t, m.last().Header.Get("Connection"), "%+v", c)
	}
	x := m.state("POST", exec, "", upgrade("SPDY/3.1")...)
	x.Req.Proto = pipeline.HTTP2
	require.Equal(t, 400, m.decide(x).code, "HTTP/2 has no upgrades")
}

func TestRequestsAreChargedByTheirKind(t *testing.T) {
	const leases = "/apis/coordination.k8s.io/v1/namespaces/leases/leases"
	m := newPod(t)
	m.policy(policytest.Locked("s1"))
	for _, c := range []struct {
		method, target, body string
		want                 *bounds.Account
	}{
		{"GET", "/api/v1/pods", "", &m.budgets.Held},
		{"GET", "/version", "", &m.budgets.Held},
		{"GET", "/api/v1/pods?watch=1", "", &m.budgets.Long},
		{"GET", "/api/v1/namespaces/a/pods/b/log", "", &m.budgets.Long},
		{"GET", leases + "/leases", "", &m.budgets.Lock},
		{"GET", leases + "/other", "", &m.budgets.Held},
		{"POST", leases, `{"metadata":{"name":"leases"}}`, &m.budgets.Lock},
		{"POST", leases, `{"metadata":{"name":"other"}}`, &m.budgets.Held}, // by its body
	} {
		x := m.state(c.method, c.target, c.body)
		require.Equal(t, 200, m.decide(x).code)
		require.Same(t, c.want, x.Memory.Budget, "%+v", c)
		c.want.Take(pipeline.MaxHeld * 4)
		a := m.do(c.method, c.target, c.body)
		c.want.Give(pipeline.MaxHeld * 4)
		require.Equal(t, 429, a.code, "%+v", c)
		require.Equal(t, meshv1.RefusedBound, a.reason)
	}
}

func TestAuditIDRelatesTheAccessLine(t *testing.T) {
	m := newPod(t)
	m.policy(nil)
	for _, c := range []struct {
		debug bool
		sent  string
		want  bool
	}{{false, "", false}, {true, "", true}, {true, "theirs", true}} {
		x := m.state("GET", "/version", "")
		if x.Debug = c.debug; c.sent != "" {
			x.Req.Header.Set(pipeline.AuditHeader, c.sent)
		}
		m.decide(x)
		got := m.last().Header.Get(pipeline.AuditHeader)
		require.Equal(t, c.want, got != "")
		if c.sent != "" {
			require.Equal(t, c.sent, got)
		}
	}
}

func TestConnectionUnderAnEarlierPolicyStartsOver(t *testing.T) {
	m := newPod(t)
	inForce := true
	m.env.Enter = func(*pipeline.State, *Policy) bool { return inForce }
	pol := m.policy(nil)
	x := m.state("POST", "/api/v1/namespaces/a/pods/b/exec", "")
	require.Nil(t, pol.Evaluate(x))
	require.True(t, x.Connected)
	inForce = false
	require.Same(t, pipeline.Restart, pol.Evaluate(m.state("POST", "/api/v1/namespaces/a/pods/b/exec", "")))
}
