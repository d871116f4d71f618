package stages

import (
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

func TestUserAgentIsReplacedOrPrefixed(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	for _, q := range []struct {
		sharding *meshv1.Sharding
		sent     string
		want     string
	}{
		{policytest.Owning("mine"), "operator/v1", "operator/v1"},
		{&meshv1.Sharding{Shard: "s1", UserAgent: "canary"}, "operator/v1", "canary"},
		{&meshv1.Sharding{Shard: "s1", UserAgentPrefix: "canary/"}, "operator/v1", "canary/operator/v1"},
		{&meshv1.Sharding{Shard: "s1", UserAgent: "canary", DryRun: true}, "operator/v1", "operator/v1"},
	} {
		m.policy(q.sharding)
		for _, target := range []string{"/api/v1/namespaces/mine/pods", "/api/v1/pods?watch=1", "/version"} {
			require.Equal(t, 200, m.do("GET", target, "", "User-Agent", q.sent).code)
			require.Equal(t, []string{q.want}, m.last().Header.Values("User-Agent"), target)
		}
	}
}

func TestRulesMatchTheUserAgentOfTheClient(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.set(&meshv1.PodPolicy{
		Version: "1", Sharding: &meshv1.Sharding{Shard: "s1", UserAgent: "canary"},
		Traffic: &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "b", Rules: []*meshv1.LimitRule{{
			Name: "r", Key: "k", UserAgents: []string{"operator/*"}, Resources: []*meshv1.ResourceMatch{{}}, Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED,
		}}}}},
	})
	require.Equal(t, 503, m.do("GET", "/api/v1/nodes", "", "User-Agent", "operator/v1").code)
	require.Equal(t, 200, m.do("GET", "/api/v1/nodes", "", "User-Agent", "canary").code)
}

func TestOwnerIsLookedUpWithTheUserAgent(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(*upstream.Request) upstream.Response {
		return response(200, typeJSON, `{"metadata":{"name":"a","uid":"theirs"}}`)
	}
	s := policytest.ByObject("pods")
	s.UserAgentPrefix = "canary/"
	m.policy(s)
	require.Equal(t, 403, m.do("DELETE", "/api/v1/namespaces/ns/pods/a", "", "User-Agent", "operator").code)
	require.Equal(t, "GET", m.last().Method)
	require.Equal(t, []string{"canary/operator"}, m.last().Header.Values("User-Agent"))
}
