package stages

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

func TestRequestsIntoMemberClusters(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.set(policytest.ThroughClusters(policytest.Clusters("own"), nil))
	for _, q := range []struct {
		method, target, body string
		want                 int
	}{
		{"GET", policytest.InOwn + "/api/v1/namespaces/a/pods/x", "", 200},
		{"POST", policytest.InOwn + "/api/v1/namespaces/a/pods", "{}", 200},
		{"DELETE", policytest.InOwn + "/api/v1/namespaces/a/pods", "", 200},
		{"GET", policytest.InOwn + "/api/v1/pods?labelSelector=a", "", 200},
		{"GET", policytest.InOwn + "/version", "", 200},
		{"GET", policytest.InOwn, "", 200},
		{"GET", policytest.InOther + "/api/v1/namespaces/a/pods/x", "", 403},
		{"GET", policytest.InOther + "/api/v1/pods", "", 403},
		{"GET", policytest.InOther + "/api/v1/pods?watch=1", "", 403},
		{"POST", policytest.InOther + "/api/v1/namespaces/a/pods", "{}", 403},
		{"DELETE", policytest.InOther + "/api/v1/namespaces/a/pods", "", 403},
		{"POST", policytest.InOther + "/api/v1/namespaces/a/pods/x/exec", "", 403},
		{"GET", policytest.InOther + "/apis", "", 403},
		{"GET", policytest.InOther, "", 403},
		{"GET", policytest.InOther + "/", "", 403},
		// A cluster that is itself such an apiserver belongs to its owner with all that is behind it.
		{"GET", policytest.InOwn + policytest.InOther + "/api/v1/pods", "", 200},
		{"GET", policytest.InOther + policytest.InOwn + "/api/v1/pods", "", 403},
		// The server in between may clean paths.
		{"GET", policytest.InOwn + "/../../other/proxy/api/v1/pods", "", 400},
		{"GET", policytest.InOwn + "/%2e%2e/%2e%2e/other/proxy/api/v1/pods", "", 400},
		{"GET", policytest.InOwn + "//api/v1/pods", "", 400},
		{"GET", policytest.InOwn + "/api/v1/namespaces/a/services/x/proxy/../../../../../../../../other/proxy/api", "", 400},
		{"GET", policytest.InOwn + "/api/v1/namespaces/a/services/x/proxy/%252e%252e/", "", 400},
		{"GET", policytest.Inventory + "/own%2fproxy/api", "", 400},
		// The policytest.Inventory itself.
		{"GET", policytest.Inventory + "/other", "", 200},
		{"PUT", policytest.Inventory + "/other", "{}", 403},
		{"PUT", policytest.Inventory + "/other/status", "{}", 403},
		{"PUT", policytest.Inventory + "/own/status", "{}", 200},
		{"DELETE", policytest.Inventory + "/other", "", 403},
		{"DELETE", policytest.Inventory, "", 403},
		{"POST", policytest.Inventory, `{"metadata":{"name":"other"}}`, 403},
		{"POST", policytest.Inventory, `{"metadata":{"name":"own"}}`, 200},
		{"POST", policytest.Inventory, `{"metadata":{"generateName":"own"}}`, 403},
		// What the apiserver has itself is not divided.
		{"PUT", "/api/v1/namespaces/other/pods/other", "{}", 200},
	} {
		before := len(m.requests)
		a := m.do(q.method, q.target, q.body)
		require.Equal(t, q.want, a.code, "%s %s: %s", q.method, q.target, a.body)
		switch q.want {
		case 200:
			require.Equal(t, q.target, m.last().URI, "it must reach the apiserver as it was sent")
		case 403:
			require.Contains(t, a.body, "ShardingConfig ns/s1")
			fallthrough
		default:
			require.Len(t, m.requests, before, "%s %s", q.method, q.target)
		}
	}
	require.Contains(t, m.do("GET", policytest.InOther+"/api/v1/pods", "").body, "cluster other does not belong to this pod's shard, ShardingConfig ns/s1: shard s2 owns it")
}

func TestStandbyReachesNoMemberCluster(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := policytest.Clusters("own")
	s.Standby = true
	m.set(policytest.ThroughClusters(s, nil))
	for _, q := range []struct{ method, target string }{{"GET", "/api/v1/pods"}, {"PUT", "/api/v1/namespaces/a/pods/x"}, {"GET", "/version"}} {
		a := m.do(q.method, policytest.InOwn+q.target, "")
		require.Equal(t, 503, a.code, a.body)
		require.Equal(t, "1", a.retryAfter())
	}
	require.Empty(t, m.requests)
}

func TestLocksInMemberClustersKeepTheirNames(t *testing.T) {
	for name, s := range map[string]*meshv1.Sharding{"by cluster": policytest.Clusters("own"), "by namespace": byNamespace()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newPod(t)
			s.Locks = policytest.Locked("s1").Locks
			m.set(policytest.ThroughClusters(s, nil))
			l := s.Locks[0]
			at := "/apis/coordination.k8s.io/v1/namespaces/" + l.Namespace + "/leases/" + l.Name
			m.do("GET", at, "")
			require.True(t, strings.HasSuffix(m.last().URI, l.UpstreamName))
			m.do("GET", policytest.InOwn+at, "")
			require.Equal(t, policytest.InOwn+at, m.last().URI)
			record := `{"metadata":{"name":"elsewhere"},"spec":{"holderIdentity":"pod_1","leaseDurationSeconds":15,"acquireTime":"2026-01-01T00:00:00.000000Z","renewTime":"2026-01-01T00:00:00.000000Z","leaseTransitions":0}}`
			require.Equal(t, 503, m.do("POST", "/apis/coordination.k8s.io/v1/namespaces/a/leases", record).code)
			require.Equal(t, 200, m.do("POST", policytest.InOwn+"/apis/coordination.k8s.io/v1/namespaces/a/leases", record).code)
		})
	}
}

func TestIsolationOfMemberClusters(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		edit   func(*meshv1.Sharding)
		counts string // action
	}{
		"Observe": {func(s *meshv1.Sharding) { s.Isolation = meshv1.Isolation_ISOLATION_OBSERVE }, "observed"},
		"Off":     {func(s *meshv1.Sharding) { s.Isolation = meshv1.Isolation_ISOLATION_OFF }, ""},
		"dry run": {func(s *meshv1.Sharding) { s.DryRun = true }, "refused"},
	} {
		for foreign, s := range map[string]*meshv1.Sharding{
			policytest.InOther + "/api/v1/namespaces/a/pods/x": policytest.Clusters("own"),
			policytest.InOwn + "/api/v1/namespaces/b/pods/x":   byNamespace(),
		} {
			t.Run(name+" "+s.Key.String(), func(t *testing.T) {
				t.Parallel()
				m := newPod(t)
				c.edit(s)
				m.set(policytest.ThroughClusters(s, nil))
				require.Equal(t, 200, m.do("PUT", foreign, "{}").code)
				counted := m.env.Metrics.Foreign
				if s.DryRun {
					counted = m.env.Metrics.DryRun
				}
				if c.counts != "" {
					require.EqualValues(t, 1, testutil.ToFloat64(counted.WithLabelValues("ns", "operator", "s1", "update", c.counts)))
				}
			})
		}
	}
}

// byNamespace is a shard that owns the pods of one namespace, in member clusters, too.
func byNamespace() *meshv1.Sharding {
	s := policytest.Owning("a")
	s.Method, s.ReadAll, s.Limits[0].Resources = meshv1.Method_METHOD_AUTO, true, policytest.Core("pods", "services")
	return s
}

// ofTwoShards is a shard that owns namespace a, beside one that owns namespace b.
func ofTwoShards() *meshv1.Sharding {
	s := byNamespace()
	s.Owners = []*meshv1.Owner{{Shard: "s1", Scope: sharding.Keys("a").Proto()}, {Shard: "s2", Scope: sharding.Keys("b").Proto()}}
	return s
}

func TestNamespaceBelongsToItsShardInAllClusters(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.set(policytest.ThroughClusters(ofTwoShards(), nil))
	for _, cluster := range []string{"", policytest.InOwn, policytest.InOther, policytest.InOwn + policytest.InOther} {
		for _, q := range []struct {
			method, target, body string
			want                 int
		}{
			{"GET", "/api/v1/namespaces/a/pods/x", "", 200},
			{"PUT", "/api/v1/namespaces/a/pods/x", "{}", 200},
			{"POST", "/api/v1/namespaces/a/pods/x/exec", "", 200},
			{"GET", "/api/v1/namespaces/b/pods/x", "", 200}, // spec.reads
			{"PUT", "/api/v1/namespaces/b/pods/x", "{}", 403},
			{"PUT", "/api/v1/namespaces/b/pods/x/status", "{}", 403},
			{"POST", "/api/v1/namespaces/b/pods", "{}", 403},
			{"POST", "/api/v1/namespaces/b/pods/x/exec", "", 403},
			{"PUT", "/api/v1/namespaces/b/configmaps/x", "{}", 200}, // not divided
			{"PUT", "/api/v1/nodes/x", "{}", 200},
			{"GET", "/version", "", 200},
		} {
			before := len(m.requests)
			a := m.do(q.method, cluster+q.target, q.body)
			require.Equal(t, q.want, a.code, "%s %s: %s", q.method, cluster+q.target, a.body)
			if q.want == 200 {
				require.Equal(t, cluster+q.target, m.last().URI)
				continue
			}
			require.Len(t, m.requests, before)
			require.Contains(t, a.body, "namespace b does not belong to this pod's shard, ShardingConfig ns/s1: shard s2 owns it")
		}
		m.do("DELETE", cluster+"/api/v1/namespaces/b/pods", "")
		require.Contains(t, m.last().URI, "labelSelector=", "it must delete nothing")
	}
	require.Equal(t, 400, m.do("GET", policytest.InOwn+"/api/v1/namespaces/b/../a/pods/x", "").code, "the server in between may clean paths")
}

// The pod's own namespace is never foreign, so that it can keep its own objects there. It has none
// in member clusters.
func TestFenceOfNamespacesInMemberClusters(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := byNamespace()
	s.FenceNamespaces = true
	m.set(policytest.ThroughClusters(s, nil))
	for target, want := range map[string]int{
		"/api/v1/namespaces/ns/configmaps/x":                    200,
		policytest.InOwn + "/api/v1/namespaces/ns/configmaps/x": 403,
		policytest.InOwn + "/api/v1/namespaces/b/configmaps/x":  403,
		policytest.InOwn + "/api/v1/namespaces/a/configmaps/x":  200,
	} {
		require.Equal(t, want, m.do("PUT", target, "{}").code, target)
	}
}
