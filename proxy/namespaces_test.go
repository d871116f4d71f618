package proxy

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apiwatch "k8s.io/apimachinery/pkg/watch"

	"github.com/ctrlmesh/ctrlmesh/internal/sample"
	"github.com/ctrlmesh/ctrlmesh/proxy/activity"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
)

func TestListsInMemberClustersAreNarrowedToNamespaces(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(false, object("a", "x"), object("b", "y"), object("", "z")))
	m.set(policytest.ThroughClusters(dividing("a"), nil))
	c := m.client(true)
	for _, media := range []string{jsonType, protoType} {
		require.Equal(t, []string{"/z", "a/x"}, m.all(c, policytest.InOwn+allPods, media, 0))
		require.Equal(t, []string{"/z", "a/x", "b/y"}, m.all(c, policytest.InOwn+"/api/v1/configmaps", media, 0), "not divided")
	}
}

func TestStandbyInMemberClusters(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(false, object("a", "x")))
	m.set(policytest.ThroughClusters(inStandby(dividing("a")), nil))
	require.Empty(t, m.all(m.client(true), policytest.InOwn+allPods, jsonType, 0))
	a := m.do("PUT", policytest.InOwn+"/api/v1/namespaces/a/pods/x", "{}")
	require.Equal(t, 503, a.StatusCode, a.body)
	require.NotEmpty(t, a.Header.Get("Retry-After"))
}

func TestWatchesInMemberClustersResumeWithWhatTheShardGained(t *testing.T) {
	t.Parallel()
	i := &informed{api: newVersioned(), prefix: policytest.InOwn}
	for _, name := range []string{"a", "b", "c"} {
		i.api.put(apiwatch.Added, name, "pod-"+name)
	}
	i.mesh = newMesh(t, i.api)
	i.set(policytest.ThroughClusters(dividing("a", "b"), nil))
	i.settle()
	i.inform("", jsonType)
	i.requireHolds("a/pod-a", "b/pod-b")
	i.set(policytest.ThroughClusters(dividing("b", "c"), nil))
	i.requireHolds("b/pod-b", "c/pod-c")
	clients, exact := i.api.relisted()
	require.Equal(t, 1, clients, "the client need not list")
	require.Len(t, exact, 1)
}

func TestWritesOfGainedNamespacesAwaitCachesOfMemberClusters(t *testing.T) {
	t.Parallel()
	g := newGaining(t, dividing("a"))
	g.changeMembers(dividing("a"))
	g.settle()
	g.watch(policytest.InOwn + allPods + fromFive)
	g.changeMembers(dividing("a", "b"))
	g.requireCode(409, "PUT", policytest.InOwn+gained)
	g.requireCode(409, "PUT", gained) // its controller may look at objects of all clusters
	g.requireCode(200, "PUT", policytest.InOwn+ownedAll)
	g.relist(policytest.InOwn + allPods)
	g.passTime(relist.Deciding)
	g.requireCode(200, "PUT", policytest.InOwn+gained)
}

func TestConnectionIntoAPodOfAMemberClusterEndsWithItsNamespace(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	m.set(policytest.ThroughClusters(dividing("a", "b"), nil))
	c := m.client(false)
	end := m.open(c, policytest.InOwn+"/api/v1/namespaces/b/services/x/proxy/y?watch=1")
	kept := m.open(c, policytest.InOwn+"/api/v1/namespaces/a/services/x/proxy/y?watch=1")
	m.set(policytest.ThroughClusters(dividing("a"), nil))
	select {
	case err := <-end:
		require.NoError(t, err)
	case <-time.After(soon):
		t.Fatal("the connection goes on")
	}
	select {
	case err := <-kept:
		t.Fatalf("the connection into a namespace of the shard ended: %v", err)
	default:
	}
}

// A shard is refused what others own in any cluster, so what several write undivided is in one list.
func TestActivityInMemberClusters(t *testing.T) {
	t.Parallel()
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{}`)) }))
	m.set(policytest.ThroughClusters(ofTwo(dividing("a")), nil))
	m.pod.env.Observations.Activity.Reset(time.Now().Add(-activity.Grace))
	m.pod.Activity()
	require.Equal(t, 200, m.do("PUT", policytest.InOwn+"/api/v1/namespaces/a/secrets/x", "{}").StatusCode)
	a := m.activityOf("secrets")
	require.NotNil(t, a)
	require.EqualValues(t, 1, a.GetWrites())
	require.Equal(t, []uint64{sample.Key("a", "")}, a.GetKeys())
}
