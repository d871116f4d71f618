package proxy

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// standby is the policy of a pod that divides pods, nodes and namespaces and owns
// nothing, with a lock in another namespace.
func standby(method meshv1.Method) *meshv1.Sharding {
	return &meshv1.Sharding{
		Shard: "s1", Standby: true, ReadAll: true, Method: method,
		Limits: []*meshv1.Limit{{
			Scope:     sharding.Scope{}.Proto(),
			Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"", "coordination.k8s.io"}, Resources: []string{"pods", "nodes", "namespaces", "configmaps", "leases"}}},
		}},
		Locks: []*meshv1.Lock{
			{Namespace: "kube-system", Name: "op", UpstreamName: "op---s1"},
			{Namespace: "ns", Name: "op", UpstreamName: "op---s1"},
		},
	}
}

func TestStandbyRefusesWritesOfDividedResources(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	c := m.client(true)
	const lease = `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"op"}}`
	for _, isolation := range []meshv1.Isolation{meshv1.Isolation_ISOLATION_ENFORCE, meshv1.Isolation_ISOLATION_OBSERVE, meshv1.Isolation_ISOLATION_OFF} {
		for _, key := range []meshv1.Key{meshv1.Key_KEY_NAMESPACE, meshv1.Key_KEY_OBJECT} {
			s := standby(meshv1.Method_METHOD_AUTO)
			s.Isolation, s.Key = isolation, key
			m.policy(s)
			for _, q := range []struct {
				method, target, body string
				want                 int
			}{
				{"POST", "/api/v1/namespaces/a/pods", "{}", 503},
				{"PUT", "/api/v1/namespaces/ns/pods/a", "{}", 503}, // its own namespace
				{"PATCH", "/api/v1/namespaces/a/pods/a/status", "{}", 503},
				{"DELETE", "/api/v1/namespaces/a/pods", "", 503},
				{"DELETE", "/api/v1/nodes/a", "", 503},
				{"POST", "/api/v1/namespaces", `{"metadata":{"name":"a"}}`, 503},
				{"POST", "/api/v1/namespaces/a/bindings", "{}", 503},
				{"GET", "/api/v1/namespaces/a/pods/a/exec", "", 503},
				{"POST", "/api/v1/namespaces/a/events", "{}", 200},
				{"PUT", "/api/v1/namespaces/ns/secrets/a", "{}", 200},
				{"GET", "/api/v1/namespaces/a/pods/a", "", 200},
				{"GET", "/api/v1/namespaces/a/pods/a/log", "", 200},
				{"GET", "/api/v1/nodes/a", "", 200},
				{"GET", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/op", "", 200},
				{"PUT", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/op", lease, 503},
				{"PATCH", "/apis/coordination.k8s.io/v1/namespaces/ns/leases/op", "{}", 503},
				{"POST", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", lease, 503},
				{"DELETE", "/api/v1/namespaces/kube-system/endpoints/op", "", 503},
				{"DELETE", "/api/v1/namespaces/kube-system/endpoints?fieldSelector=metadata.name%3Dop", "", 503},
			} {
				a := m.with(c, q.method, q.target, q.body)
				require.Equal(t, q.want, a.StatusCode, "%v %v %s %s: %s", isolation, key, q.method, q.target, a.body)
				if q.want == 503 {
					said := statusOf(t, a)
					require.Equal(t, metav1.StatusReasonServiceUnavailable, said.Reason)
					require.Equal(t, "1", a.Header.Get("Retry-After"))
					require.Contains(t, said.Message, "ShardingConfig ns/s1")
					require.Contains(t, said.Message, "standby")
				} else {
					require.Equal(t, q.target, api.last(t).URI)
				}
			}
		}
	}
}

func TestStandbyFencesNamespaces(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	s := standby(meshv1.Method_METHOD_AUTO)
	s.FenceNamespaces = true
	m.policy(s)
	require.Equal(t, 503, m.do("PUT", "/api/v1/namespaces/a/secrets/a", "{}").StatusCode)
	require.Equal(t, 200, m.do("PUT", "/api/v1/namespaces/ns/secrets/a", "{}").StatusCode, "its own namespace")
}

func TestStandbyFindsNothing(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(true, twenty()...))
	c := m.client(true)
	for _, method := range []meshv1.Method{meshv1.Method_METHOD_AUTO, meshv1.Method_METHOD_LABELS, meshv1.Method_METHOD_FILTER} {
		for _, key := range []meshv1.Key{meshv1.Key_KEY_NAMESPACE, meshv1.Key_KEY_OBJECT} {
			s := standby(method)
			s.Key = key
			m.policy(s)
			for form, accept := range forms {
				require.Empty(t, m.all(c, "/api/v1/configmaps", accept[0], 0), "%v %s", method, form)
				require.Empty(t, m.all(c, "/api/v1/namespaces/ns-1/configmaps", accept[0], 0), "%v %s", method, form)
				require.Empty(t, m.watched(c, "/api/v1/configmaps?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", accept[1]), "%v %s", method, form)
			}
		}
	}
}

func TestStandbyKeepsTheNamesOfLocks(t *testing.T) {
	t.Parallel()
	api := &leases{t: t}
	api.then = api.serve
	m := newMesh(t, &api.recorder)
	m.policy(standby(meshv1.Method_METHOD_AUTO))
	for _, target := range []string{
		"/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/op",
		"/apis/coordination.k8s.io/v1/namespaces/kube-system/leases?fieldSelector=metadata.name%3Dop",
	} {
		a := m.do("GET", target, "")
		require.Equal(t, 404, a.StatusCode)
		require.Equal(t, target, api.last(t).URI, "not narrowed, not renamed")
		require.NotContains(t, a.body, "---")
	}
}

// TestStandbySettlesAfterEarlierWrites checks that a policy of standby is acknowledged
// only when no write that the policy before let through can take effect any more.
func TestStandbySettlesAfterEarlierWrites(t *testing.T) {
	t.Parallel()
	arrived, answer := make(chan struct{}), make(chan struct{})
	api := &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			arrived <- struct{}{}
			<-answer
		}
	}}
	m := newMesh(t, api)
	free := standby(meshv1.Method_METHOD_AUTO)
	free.Standby, free.Limits[0].Scope = false, sharding.All().Proto()
	m.policy(free)
	written := make(chan int, 1)
	go func() {
		written <- m.with(m.client(true), "PUT", "/api/v1/namespaces/a/pods/a", "{}").StatusCode
	}()
	<-arrived
	settled := m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "2", Sharding: standby(meshv1.Method_METHOD_AUTO)})
	select {
	case <-settled:
		t.Fatal("a write is under way")
	case <-time.After(50 * time.Millisecond):
	}
	close(answer)
	require.Equal(t, 200, <-written)
	select {
	case <-settled:
	case <-time.After(soon):
		t.Fatal("the standby has not settled")
	}
}

func TestLeavingStandbyRelists(t *testing.T) {
	t.Parallel()
	m := newMesh(t, watches())
	m.restore(standby(meshv1.Method_METHOD_AUTO), time.Time{})
	c := m.client(true)
	const pods, secrets = "/api/v1/pods?watch=1&resourceVersion=5", "/api/v1/secrets?watch=1&resourceVersion=5"
	quiet, other := m.open(c, pods), m.open(c, secrets)
	granted := standby(meshv1.Method_METHOD_AUTO)
	granted.Standby, granted.Limits[0].Scope = false, sharding.Keys("a").Proto()
	m.policy(granted)
	require.NoError(t, <-quiet)
	require.Equal(t, 410, m.with(c, "GET", pods, "").StatusCode)
	select {
	case err := <-other:
		t.Fatal("a watch of another resource ended:", err)
	default:
	}
}

func TestStandbyCutsConnectionsIntoPods(t *testing.T) {
	t.Parallel()
	free := standby(meshv1.Method_METHOD_AUTO)
	free.Standby, free.Limits[0].Scope = false, sharding.All().Proto()
	m := newMesh(t, &recorder{})
	m.policy(free)
	before := m.pod.env.Policy.Load()
	exec := match.Kind{Verb: "create", Subresource: "exec", Resource: "pods"}
	require.False(t, before.Refuses(exec, "a", ""))
	m.policy(standby(meshv1.Method_METHOD_AUTO))
	require.True(t, m.pod.env.Policy.Load().Refuses(exec, "a", ""))
	require.False(t, m.pod.env.Policy.Load().Refuses(match.Kind{Verb: "get", Resource: "pods"}, "a", ""))
	require.False(t, strings.Contains(m.pod.env.Policy.Load().Locks[0].Path("/op", 0), "---"))
}
