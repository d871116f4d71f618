package stages

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

const (
	inventory = "/apis/cluster.karmada.io/v1alpha1/clusters"
	inOwn     = inventory + "/own/proxy"
	inOther   = inventory + "/other/proxy"
)

// clusters is a shard that owns the member clusters of some names.
func clusters(names ...string) *meshv1.Sharding {
	return &meshv1.Sharding{
		Shard: "s1", Key: meshv1.Key_KEY_CLUSTER, ReadAll: true,
		Limits: []*meshv1.Limit{{
			Scope:     sharding.Keys(names...).Proto(),
			Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"cluster.karmada.io"}, Resources: []string{"clusters"}}},
		}},
		Owners: []*meshv1.Owner{{Shard: "s1", Scope: sharding.Keys(names...).Proto()}, {Shard: "s2", Scope: sharding.Keys("other").Proto()}},
	}
}

// throughClusters is a policy under which requests reach member clusters.
func throughClusters(s *meshv1.Sharding) *meshv1.PodPolicy {
	return &meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", ClusterPaths: []string{inventory + "/*/proxy"}, Sharding: s}
}

func TestRequestsIntoMemberClusters(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.set(throughClusters(clusters("own")))
	for _, q := range []struct {
		method, target, body string
		want                 int
	}{
		{"GET", inOwn + "/api/v1/namespaces/a/pods/x", "", 200},
		{"POST", inOwn + "/api/v1/namespaces/a/pods", "{}", 200},
		{"DELETE", inOwn + "/api/v1/namespaces/a/pods", "", 200},
		{"GET", inOwn + "/api/v1/pods?labelSelector=a", "", 200},
		{"GET", inOwn + "/version", "", 200},
		{"GET", inOwn, "", 200},
		{"GET", inOther + "/api/v1/namespaces/a/pods/x", "", 403},
		{"GET", inOther + "/api/v1/pods", "", 403},
		{"GET", inOther + "/api/v1/pods?watch=1", "", 403},
		{"POST", inOther + "/api/v1/namespaces/a/pods", "{}", 403},
		{"DELETE", inOther + "/api/v1/namespaces/a/pods", "", 403},
		{"POST", inOther + "/api/v1/namespaces/a/pods/x/exec", "", 403},
		{"GET", inOther + "/apis", "", 403},
		{"GET", inOther, "", 403},
		{"GET", inOther + "/", "", 403},
		// A cluster that is itself such an apiserver belongs to its owner with all that is behind it.
		{"GET", inOwn + inOther + "/api/v1/pods", "", 200},
		{"GET", inOther + inOwn + "/api/v1/pods", "", 403},
		// The server in between may clean paths.
		{"GET", inOwn + "/../../other/proxy/api/v1/pods", "", 400},
		{"GET", inOwn + "/%2e%2e/%2e%2e/other/proxy/api/v1/pods", "", 400},
		{"GET", inOwn + "//api/v1/pods", "", 400},
		{"GET", inOwn + "/api/v1/namespaces/a/services/x/proxy/../../../../../../../../other/proxy/api", "", 400},
		{"GET", inOwn + "/api/v1/namespaces/a/services/x/proxy/%252e%252e/", "", 400},
		{"GET", inventory + "/own%2fproxy/api", "", 400},
		// The inventory itself.
		{"GET", inventory + "/other", "", 200},
		{"PUT", inventory + "/other", "{}", 403},
		{"PUT", inventory + "/other/status", "{}", 403},
		{"PUT", inventory + "/own/status", "{}", 200},
		{"DELETE", inventory + "/other", "", 403},
		{"DELETE", inventory, "", 403},
		{"POST", inventory, `{"metadata":{"name":"other"}}`, 403},
		{"POST", inventory, `{"metadata":{"name":"own"}}`, 200},
		{"POST", inventory, `{"metadata":{"generateName":"own"}}`, 403},
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
	require.Contains(t, m.do("GET", inOther+"/api/v1/pods", "").body, "cluster other does not belong to this pod's shard, ShardingConfig ns/s1: shard s2 owns it")
}

func TestStandbyReachesNoMemberCluster(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := clusters("own")
	s.Standby = true
	m.set(throughClusters(s))
	for _, q := range []struct{ method, target string }{{"GET", "/api/v1/pods"}, {"PUT", "/api/v1/namespaces/a/pods/x"}, {"GET", "/version"}} {
		a := m.do(q.method, inOwn+q.target, "")
		require.Equal(t, 503, a.code, a.body)
		require.Equal(t, "1", a.retryAfter())
	}
	require.Empty(t, m.requests)
}

func TestLocksInMemberClustersKeepTheirNames(t *testing.T) {
	for name, s := range map[string]*meshv1.Sharding{"by cluster": clusters("own"), "by namespace": byNamespace()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newPod(t)
			s.Locks = locked().Locks
			m.set(throughClusters(s))
			l := s.Locks[0]
			at := "/apis/coordination.k8s.io/v1/namespaces/" + l.Namespace + "/leases/" + l.Name
			m.do("GET", at, "")
			require.True(t, strings.HasSuffix(m.last().URI, l.UpstreamName))
			m.do("GET", inOwn+at, "")
			require.Equal(t, inOwn+at, m.last().URI)
			record := `{"metadata":{"name":"elsewhere"},"spec":{"holderIdentity":"pod_1","leaseDurationSeconds":15,"acquireTime":"2026-01-01T00:00:00.000000Z","renewTime":"2026-01-01T00:00:00.000000Z","leaseTransitions":0}}`
			require.Equal(t, 503, m.do("POST", "/apis/coordination.k8s.io/v1/namespaces/a/leases", record).code)
			require.Equal(t, 200, m.do("POST", inOwn+"/apis/coordination.k8s.io/v1/namespaces/a/leases", record).code)
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
			inOther + "/api/v1/namespaces/a/pods/x": clusters("own"),
			inOwn + "/api/v1/namespaces/b/pods/x":   byNamespace(),
		} {
			t.Run(name+" "+s.Key.String(), func(t *testing.T) {
				t.Parallel()
				m := newPod(t)
				c.edit(s)
				m.set(throughClusters(s))
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
	s := owning("a")
	s.Method, s.ReadAll, s.Limits[0].Resources = meshv1.Method_METHOD_AUTO, true, core("pods", "services")
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
	m.set(throughClusters(ofTwoShards()))
	for _, cluster := range []string{"", inOwn, inOther, inOwn + inOther} {
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
	require.Equal(t, 400, m.do("GET", inOwn+"/api/v1/namespaces/b/../a/pods/x", "").code, "the server in between may clean paths")
}

// The pod's own namespace is never foreign, so that it can keep its own objects there. It has none
// in member clusters.
func TestFenceOfNamespacesInMemberClusters(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := byNamespace()
	s.FenceNamespaces = true
	m.set(throughClusters(s))
	for target, want := range map[string]int{
		"/api/v1/namespaces/ns/configmaps/x":         200,
		inOwn + "/api/v1/namespaces/ns/configmaps/x": 403,
		inOwn + "/api/v1/namespaces/b/configmaps/x":  403,
		inOwn + "/api/v1/namespaces/a/configmaps/x":  200,
	} {
		require.Equal(t, want, m.do("PUT", target, "{}").code, target)
	}
}
