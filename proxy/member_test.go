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
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
)

func TestInventoryOfClustersIsNarrowed(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(false, object("", "own"), object("", "other")))
	m.set(policytest.ThroughClusters(policytest.Clusters("own"), nil))
	c := m.client(true)
	require.Equal(t, []string{"/own"}, m.all(c, policytest.Inventory, jsonType, 0))
	require.Equal(t, []string{"/other", "/own"}, m.all(c, policytest.InOwn+"/api/v1/configmaps", jsonType, 0), "in a cluster of the shard nothing is narrowed")
}

// A cluster comes back later. Meanwhile another shard has written there.
func TestCachesOfAMemberClusterFollowItsOwner(t *testing.T) {
	t.Parallel()
	g := newGaining(t, policytest.Clusters("own"))
	to := func(names ...string) {
		t.Helper()
		g.changeMembers(policytest.Clusters(names...))
	}
	const (
		pods, object = policytest.InOwn + "/api/v1/pods", policytest.InOwn + "/api/v1/namespaces/a/pods/x"
		elsewhere    = policytest.Inventory + "/kept/proxy/api/v1/namespaces/a/pods/x"
	)
	to("own", "kept")
	g.settle()
	g.watch(pods + fromFive)
	g.requireCode(200, "PUT", object)

	to("kept") // ends the watch
	g.requireCode(403, "GET", pods+fromFive)
	g.requireCode(403, "PUT", object)
	g.passTime(relist.ResumeWithin)
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
	g := newGaining(t, policytest.Clusters("kept"))
	g.set(policytest.ThroughClusters(policytest.Clusters("kept"), nil))
	g.requireCode(403, "GET", policytest.InOther+"/api/v1/pods")
	g.set(policytest.ThroughClusters(policytest.Clusters("kept", "own"), nil))
	g.requireCode(200, "PUT", policytest.InOwn+"/api/v1/namespaces/a/pods/x")
	g.requireCode(403, "GET", policytest.InOther+"/api/v1/pods")
	g.requireCode(200, "PUT", policytest.InOwn+"/api/v1/namespaces/a/pods/x")
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
		m.set(policytest.ThroughClusters(nil, &meshv1.Traffic{Injections: []*meshv1.Injection{{Name: "chaos", Rules: []*meshv1.FaultRule{c.rule}}}}))
		require.Equal(t, c.home, m.do("GET", "/api/v1/pods", "").StatusCode, c.rule.Name)
		require.Equal(t, c.own, m.do("GET", policytest.InOwn+"/api/v1/pods", "").StatusCode, c.rule.Name)
		require.Equal(t, c.another, m.do("GET", policytest.InOther+"/api/v1/pods", "").StatusCode, c.rule.Name)
	}
	one, err := testutil.GatherAndCount(m.registry, "ctrlmesh_cluster_requests_total")
	require.NoError(t, err)
	require.Equal(t, 5, one, "of two clusters by code: 500, 501 and 200; 500 and 200")
}

func TestConnectionIntoAPodOfAMemberClusterEndsWithItsOwner(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	m.set(policytest.ThroughClusters(policytest.Clusters("own"), nil))
	end := m.open(m.client(false), policytest.InOwn+"/api/v1/namespaces/a/services/x/proxy/y?watch=1")
	m.set(policytest.ThroughClusters(policytest.Clusters("kept"), nil))
	select {
	case err := <-end:
		require.NoError(t, err)
	case <-time.After(soon):
		t.Fatal("the connection goes on")
	}
}

func TestAccessLineNamesTheCluster(t *testing.T) {
	t.Parallel()
	m := newMesh(t, http.NotFoundHandler())
	m.set(policytest.ThroughClusters(nil, nil))
	m.do("GET", policytest.InOwn+"/api/v1/pods", "")
	m.do("GET", "/api/v1/pods", "")
	require.Eventually(t, func() bool { return strings.Count(m.logs.String(), `"msg":"request"`) == 2 }, soon, time.Millisecond)
	lines := slices.DeleteFunc(strings.Split(m.logs.String(), "\n"), func(l string) bool { return !strings.Contains(l, `"msg":"request"`) })
	require.Contains(t, lines[0], `"resource":"pods"`)
	require.Contains(t, lines[0], `"cluster":"own"`)
	require.NotContains(t, lines[1], `"cluster"`)
}
