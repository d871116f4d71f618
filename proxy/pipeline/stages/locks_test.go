package stages

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

func TestStandbyKeepsTheNamesOfLocks(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(*upstream.Request) upstream.Response { return response(404, typeJSON, `{"details":{"name":"op"}}`) }
	m.policy(policytest.Standby(meshv1.Method_METHOD_AUTO))
	for _, target := range []string{
		"/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/op",
		"/apis/coordination.k8s.io/v1/namespaces/kube-system/leases?fieldSelector=metadata.name%3Dop",
	} {
		a := m.do("GET", target, "")
		require.Equal(t, 404, a.code)
		require.Equal(t, target, m.last().URI, "not narrowed, not renamed")
		require.NotContains(t, a.body, "---")
	}
}

func TestWhatIsTheLock(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.policy(policytest.Locked("s1"))
	const base = "/apis/coordination.k8s.io/v1/namespaces/leases/leases"
	for _, c := range []struct{ method, target, want string }{
		{"GET", base + "/leases/", base + "/leases---s1/"},
		{"GET", base + "/leases/status", base + "/leases/status"},
		{"GET", base + "/other", base + "/other"},
		{"GET", "/apis/coordination.k8s.io/v1/namespaces/default/leases/leases", "/apis/coordination.k8s.io/v1/namespaces/default/leases/leases"},
		{"GET", "/apis/example.com/v1/namespaces/leases/leases/leases", "/apis/example.com/v1/namespaces/leases/leases/leases"},
		{"GET", "/apis/coordination.k8s.io/v1beta1/namespaces/leases/leases/leases", "/apis/coordination.k8s.io/v1beta1/namespaces/leases/leases/leases---s1"},
		{"DELETE", "/api/v1/namespaces/leases/configmaps/leases", "/api/v1/namespaces/leases/configmaps/leases---s1"},
		{"GET", "/api/v1/namespaces/leases/endpoints/leases", "/api/v1/namespaces/leases/endpoints/leases---s1"},
		{"GET", "/api/v1/namespaces/leases/secrets/leases", "/api/v1/namespaces/leases/secrets/leases"},
		{"GET", "/apis/coordination.k8s.io/v1/watch/namespaces/leases/leases/leases", "/apis/coordination.k8s.io/v1/watch/namespaces/leases/leases/leases---s1"},
		{"GET", base + "?fieldSelector=metadata.name%3D%3Dleases&limit=1", base + "?fieldSelector=metadata.name%3Dleases---s1&limit=1"},
		{"DELETE", base + "?fieldSelector=metadata.name%3Dleases", base + "?fieldSelector=metadata.name%3Dleases---s1"},
		{"GET", base + "?limit=1", base + "?limit=1"},
	} {
		require.Equal(t, 200, m.do(c.method, c.target, "").code, c.target)
		require.Equal(t, c.want, m.last().URI)
	}
}

func TestLockBodiesThatCannotBeRead(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.policy(policytest.Locked("s1"))
	const base = "/apis/coordination.k8s.io/v1/namespaces/leases/leases"
	for _, c := range []struct {
		method, target, contentType, body string
		code                              int
	}{
		{"POST", base, "application/cbor", "x", 415},
		{"PATCH", base + "/leases", "application/apply-patch+cbor", "x", 415},
		{"PUT", base + "/leases", "application/json", "{", 400},
		{"POST", base, "application/json", "{", 400},
		{"POST", base, "application/json", `"` + strings.Repeat("x", 3<<20) + `"`, 413},
	} {
		a := m.do(c.method, c.target, c.body, "Content-Type", c.contentType)
		require.Equal(t, c.code, a.code, "%s %s", c.method, c.target)
	}
	require.Equal(t, 406, m.do("GET", base+"/leases", "", "Accept", "application/cbor").code)
	require.Equal(t, 415, m.do("POST", base, "{}", "Content-Encoding", "gzip").code)
	require.Empty(t, m.requests)
	// Another object's body is nobody's business.
	require.Equal(t, 200, m.do("PUT", base+"/other", "x", "Content-Type", "application/cbor").code)
}

func TestLockWatchIsRenamed(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(*upstream.Request) upstream.Response {
		return response(200, "application/json;stream=watch", `{"type":"ADDED","object":{"kind":"Lease","metadata":{"name":"leases---s1"}}}`+"\n")
	}
	s := policytest.Locked("s1")
	s.Limits = []*meshv1.Limit{{Selector: "a=b"}}
	m.policy(s)
	a := m.do("GET", "/apis/coordination.k8s.io/v1/namespaces/leases/leases?fieldSelector=metadata.name%3Dleases&watch=1", "", "Accept-Encoding", "gzip")
	require.Equal(t, `{"type":"ADDED","object":{"kind":"Lease","metadata":{"name":"leases"}}}`+"\n", a.body)
	require.Empty(t, m.last().Header.Get("Accept-Encoding"))
	require.NotContains(t, m.last().URI, "labelSelector", "the lock is the shard's, whatever its labels")
}
