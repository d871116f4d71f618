package stages

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
)

// denying is a shard that owns all ConfigMaps, and denies some clients.
func denying(agents ...string) *meshv1.Sharding {
	return &meshv1.Sharding{Shard: "s1", ReadAll: true, DeniedUserAgents: agents, Limits: []*meshv1.Limit{{
		Scope:     sharding.All().Proto(),
		Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"configmaps"}}},
	}}}
}

func TestDeniedUserAgentsAreRefused(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := denying("statistics/*")
	s.Locks = policytest.Locked("s1").Locks
	m.policy(s)
	for _, q := range []struct{ method, target string }{
		{"GET", "/api/v1/namespaces/ns/configmaps/a"}, {"GET", "/api/v1/nodes/a"}, {"GET", "/api/v1/namespaces/ns/pods/a/log"},
		{"POST", "/api/v1/namespaces/ns/pods"}, {"PATCH", "/api/v1/nodes/a/status"}, {"DELETE", "/api/v1/namespaces/ns/configmaps"},
		{"GET", "/api/v1/namespaces/ns/pods/a/exec"},
	} {
		require.Equal(t, 200, m.do(q.method, q.target, "{}", "User-Agent", "operator/v1").code, "%v", q)
		a := m.do(q.method, q.target, "{}", "User-Agent", "statistics/v1")
		require.Equal(t, 403, a.code, "%v", q)
		require.Contains(t, a.body, `requests with User-Agent "statistics/v1" are served in the default subset alone`)
	}
	require.Equal(t, 200, m.do("GET", "/version", "", "User-Agent", "statistics/v1").code)

	s.DryRun = true
	m.policy(s)
	require.Equal(t, 200, m.do("GET", "/api/v1/nodes/a", "", "User-Agent", "statistics/v1").code)
	require.EqualValues(t, 1, testutil.ToFloat64(m.env.Metrics.DryRun.WithLabelValues("ns", "operator", "s1", "get", "refused")))
}

func TestDeniedUserAgentsKeepTheirLocks(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := policytest.Locked("s1")
	s.DeniedUserAgents = []string{"statistics/*"}
	m.policy(s)
	l := s.Locks[0]
	a := m.do("GET", "/apis/coordination.k8s.io/v1/namespaces/"+l.Namespace+"/leases/"+l.Name, "", "User-Agent", "statistics/v1")
	require.NotEqual(t, 403, a.code, a.body)
}

func TestRelistAfterUserAgentsAreDenied(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	before := m.policy(denying("other"))
	m.policy(denying("other", "statistics"))
	require.True(t, before.Affects(m.env.Policy.Load(), relist.Resource{GroupResource: schema.GroupResource{Resource: "configmaps"}}))
	m.policy(denying("other"))
	require.False(t, before.Affects(m.env.Policy.Load(), relist.Resource{GroupResource: schema.GroupResource{Resource: "configmaps"}}))
}
