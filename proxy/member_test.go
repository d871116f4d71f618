package proxy

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
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
func throughClusters(s *meshv1.Sharding, of *meshv1.Traffic) *meshv1.PodPolicy {
	return &meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", ClusterPaths: []string{inventory + "/*/proxy"}, Sharding: s, Traffic: of}
}

func TestRequestsIntoMemberClusters(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	c := m.client(true)
	m.set(throughClusters(clusters("own"), nil))
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
		before := len(api.requests())
		a := m.with(c, q.method, q.target, q.body)
		require.Equal(t, q.want, a.StatusCode, "%s %s: %s", q.method, q.target, a.body)
		switch q.want {
		case 200:
			require.Equal(t, q.target, api.last(t).URI, "it must reach the apiserver as it was sent")
		case 403:
			require.Contains(t, a.body, "ShardingConfig ns/s1")
			fallthrough
		default:
			require.Len(t, api.requests(), before, "%s %s", q.method, q.target)
		}
	}
	require.Contains(t, m.with(c, "GET", inOther+"/api/v1/pods", "").body, "cluster other does not belong to this pod's shard, ShardingConfig ns/s1: shard s2 owns it")
}

func TestInventoryOfClustersIsNarrowed(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(false, object("", "own"), object("", "other")))
	m.set(throughClusters(clusters("own"), nil))
	c := m.client(true)
	require.Equal(t, []string{"/own"}, m.all(c, inventory, jsonType, 0))
	require.Equal(t, []string{"/other", "/own"}, m.all(c, inOwn+"/api/v1/configmaps", jsonType, 0), "in a cluster of the shard nothing is narrowed")
}

// A cluster comes back later. Meanwhile another shard has written there.
func TestCachesOfAMemberClusterFollowItsOwner(t *testing.T) {
	t.Parallel()
	g := newGaining(t, clusters("own"))
	to := func(names ...string) {
		t.Helper()
		g.changeMembers(clusters(names...))
	}
	const (
		pods, object = inOwn + "/api/v1/pods", inOwn + "/api/v1/namespaces/a/pods/x"
		elsewhere    = inventory + "/kept/proxy/api/v1/namespaces/a/pods/x"
	)
	to("own", "kept")
	g.settle()
	g.watch(pods + fromFive)
	g.requireCode(200, "PUT", object)

	to("kept") // ends the watch
	g.requireCode(403, "GET", pods+fromFive)
	g.requireCode(403, "PUT", object)
	g.passTime(relist.Settling)
	g.requireCode(403, "GET", pods) // its client tries again

	to("own", "kept")
	g.requireCode(409, "PUT", object)
	g.requireCode(200, "PUT", elsewhere)
	g.requireCode(410, "GET", pods+fromFive)
	g.requireCode(409, "PUT", object)
	g.fill(pods)
	g.passTime(relist.Deciding)
	g.requireCode(200, "PUT", object)
}

func TestClientThatIsRefusedElsewhereDelaysNoWriteInAGainedCluster(t *testing.T) {
	t.Parallel()
	g := newGaining(t, clusters("kept"))
	g.set(throughClusters(clusters("kept"), nil))
	g.requireCode(403, "GET", inOther+"/api/v1/pods")
	g.set(throughClusters(clusters("kept", "own"), nil))
	g.requireCode(200, "PUT", inOwn+"/api/v1/namespaces/a/pods/x")
	g.requireCode(403, "GET", inOther+"/api/v1/pods")
	g.requireCode(200, "PUT", inOwn+"/api/v1/namespaces/a/pods/x")
}

func TestStandbyReachesNoMemberCluster(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	s := clusters("own")
	s.Standby = true
	m.set(throughClusters(s, nil))
	for _, q := range []struct{ method, target string }{{"GET", "/api/v1/pods"}, {"PUT", "/api/v1/namespaces/a/pods/x"}, {"GET", "/version"}} {
		a := m.do(q.method, inOwn+q.target, "")
		require.Equal(t, 503, a.StatusCode, a.body)
		require.NotEmpty(t, a.Header.Get("Retry-After"))
	}
	require.Empty(t, api.requests())
}

func TestLocksInMemberClustersKeepTheirNames(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]*meshv1.Sharding{"by cluster": clusters("own"), "by namespace": dividing("a")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := &recorder{}
			m := newMesh(t, api)
			s.Locks = locked("s1").Locks
			m.set(throughClusters(s, nil))
			l := s.Locks[0]
			at := "/apis/coordination.k8s.io/v1/namespaces/" + l.Namespace + "/leases/" + l.Name
			m.do("GET", at, "")
			require.True(t, strings.HasSuffix(api.last(t).URI, l.UpstreamName))
			m.do("GET", inOwn+at, "")
			require.Equal(t, inOwn+at, api.last(t).URI)
			record := `{"metadata":{"name":"elsewhere"},"spec":{"holderIdentity":"pod_1","leaseDurationSeconds":15,"acquireTime":"2026-01-01T00:00:00.000000Z","renewTime":"2026-01-01T00:00:00.000000Z","leaseTransitions":0}}`
			require.Equal(t, 503, m.do("POST", "/apis/coordination.k8s.io/v1/namespaces/a/leases", record).StatusCode)
			require.Equal(t, 200, m.do("POST", inOwn+"/apis/coordination.k8s.io/v1/namespaces/a/leases", record).StatusCode)
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
			inOwn + "/api/v1/namespaces/b/pods/x":   dividing("a"),
		} {
			t.Run(name+" "+s.Key.String(), func(t *testing.T) {
				t.Parallel()
				m := newMesh(t, &recorder{})
				c.edit(s)
				m.set(throughClusters(s, nil))
				require.Equal(t, 200, m.do("PUT", foreign, "{}").StatusCode)
				counted := m.server.metrics.Foreign
				if s.DryRun {
					counted = m.server.metrics.DryRun
				}
				if c.counts != "" {
					require.EqualValues(t, 1, testutil.ToFloat64(counted.WithLabelValues("ns", "operator", "s1", "update", c.counts)))
				}
			})
		}
	}
}

func TestRulesAboutMemberClusters(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	abort := func(key string, code uint32, clusters ...string) *meshv1.FaultRule {
		return &meshv1.FaultRule{
			Key: key, Name: key, Abort: &meshv1.Abort{Status: code, Percent: 100},
			Resources: []*meshv1.ResourceMatch{{Resources: []string{"pods"}, Clusters: clusters}},
		}
	}
	for _, c := range []struct {
		rule               *meshv1.FaultRule
		home, own, another int
	}{
		{abort("all", 500), 500, 500, 500},
		{abort("one", 501, "own"), 200, 501, 200},
		{abort("home", 502, ""), 502, 200, 200},
	} {
		m.set(throughClusters(nil, &meshv1.Traffic{Injections: []*meshv1.Injection{{Name: "chaos", Rules: []*meshv1.FaultRule{c.rule}}}}))
		require.Equal(t, c.home, m.do("GET", "/api/v1/pods", "").StatusCode, c.rule.Name)
		require.Equal(t, c.own, m.do("GET", inOwn+"/api/v1/pods", "").StatusCode, c.rule.Name)
		require.Equal(t, c.another, m.do("GET", inOther+"/api/v1/pods", "").StatusCode, c.rule.Name)
	}
	one, err := testutil.GatherAndCount(m.registry, "ctrlmesh_cluster_requests_total")
	require.NoError(t, err)
	require.Equal(t, 5, one, "of two clusters by code: 500, 501 and 200; 500 and 200")
}

func TestConnectionIntoAPodOfAMemberClusterEndsWithItsOwner(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	m.set(throughClusters(clusters("own"), nil))
	end := m.open(m.client(false), inOwn+"/api/v1/namespaces/a/services/x/proxy/y?watch=1")
	m.set(throughClusters(clusters("kept"), nil))
	select {
	case err := <-end:
		require.NoError(t, err)
	case <-time.After(soon):
		t.Fatal("the connection goes on")
	}
}

func TestInvalidPathsOfClustersAreRejected(t *testing.T) {
	m := newMesh(t, &recorder{})
	for _, path := range []string{"", "/clusters/proxy", "clusters/*/proxy", "/clusters/a*/proxy", "/clusters/*b/proxy", "/clusters/*/*/proxy", "/clusters/*/proxy/"} {
		_, err := m.pod.Apply(&meshv1.PodPolicy{Uid: "uid-1", ClusterPaths: []string{path}})
		require.ErrorContains(t, err, "path of clusters", path)
	}
}

func TestAccessLineNamesTheCluster(t *testing.T) {
	t.Parallel()
	m := newMesh(t, http.NotFoundHandler())
	m.set(throughClusters(nil, nil))
	m.do("GET", inOwn+"/api/v1/pods", "")
	m.do("GET", "/api/v1/pods", "")
	require.Eventually(t, func() bool { return strings.Count(m.logs.String(), `"msg":"request"`) == 2 }, soon, time.Millisecond)
	lines := slices.DeleteFunc(strings.Split(m.logs.String(), "\n"), func(l string) bool { return !strings.Contains(l, `"msg":"request"`) })
	require.Contains(t, lines[0], `"resource":"pods"`)
	require.Contains(t, lines[0], `"cluster":"own"`)
	require.NotContains(t, lines[1], `"cluster"`)
}
