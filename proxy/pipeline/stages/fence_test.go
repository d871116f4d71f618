package stages

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

func TestFence(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	own := policytest.Owning("mine")
	own.Locks = policytest.Locked("s1").Locks
	wide := policytest.Owning("mine")
	wide.FenceNamespaces = true
	for _, q := range []struct {
		method, target, body string
		plain, wide          int
	}{
		{"GET", "/api/v1/namespaces/mine/pods/a", "", 200, 200},
		{"GET", "/api/v1/namespaces/theirs/pods/a", "", 403, 403},
		{"POST", "/api/v1/namespaces/theirs/pods", "{}", 403, 403},
		{"PUT", "/api/v1/namespaces/theirs/pods/a/status", "{}", 403, 403},
		{"PATCH", "/api/v1/namespaces/theirs/pods/a", "{}", 403, 403},
		{"DELETE", "/api/v1/namespaces/theirs/pods/a", "", 403, 403},
		{"POST", "/api/v1/namespaces/theirs/pods/a/exec", "", 403, 403},
		{"POST", "/api/v1/namespaces/theirs/bindings", `{"metadata":{"name":"a"}}`, 403, 403}, // of a pod
		{"GET", "/api/v1/namespaces/theirs/pods/a/proxy/x", "", 403, 403},
		{"GET", "/api/v1/namespaces/theirs", "", 403, 403},
		{"PATCH", "/api/v1/namespaces/mine/status", "{}", 200, 200},
		{"POST", "/api/v1/namespaces", `{"metadata":{"name":"mine"}}`, 200, 200},
		{"POST", "/api/v1/namespaces", `{"metadata":{"name":"theirs"}}`, 403, 403},
		{"POST", "/api/v1/namespaces", `{"metadata":{"generateName":"mine"}}`, 403, 403},
		{"GET", "/api/v1/namespaces/theirs/secrets/a", "", 200, 200},
		{"PUT", "/api/v1/namespaces/theirs/secrets/a", "{}", 200, 403},
		{"GET", "/api/v1/namespaces/theirs/services/a/proxy/x", "", 200, 403},
		{"PUT", "/api/v1/namespaces/ns/secrets/a", "{}", 200, 200}, // the pod's own
		{"PUT", "/api/v1/nodes/a", "{}", 200, 200},
	} {
		m.policy(own)
		a := m.do(q.method, q.target, q.body)
		require.Equal(t, q.plain, a.code, "%s %s: %s", q.method, q.target, a.body)
		if q.plain == 403 {
			require.Equal(t, metav1.StatusReasonForbidden, a.status.Reason)
			require.Contains(t, a.body, "ShardingConfig ns/s1")
		}
		m.policy(wide)
		require.Equal(t, q.wide, m.do(q.method, q.target, q.body).code, "fenced namespaces: %s %s", q.method, q.target)
		for _, isolation := range []meshv1.Isolation{meshv1.Isolation_ISOLATION_OBSERVE, meshv1.Isolation_ISOLATION_OFF} {
			loose := policytest.Owning("mine")
			loose.Isolation = isolation
			m.policy(loose)
			require.Equal(t, 200, m.do(q.method, q.target, q.body).code, "%v %s %s", isolation, q.method, q.target)
			if q.body != "" {
				require.Equal(t, q.body, m.last().Body)
			}
		}
	}
	foreign := m.env.Metrics.Foreign
	require.EqualValues(t, 2, testutil.ToFloat64(foreign.WithLabelValues("ns", "operator", "s1", "patch", "refused")))
	require.EqualValues(t, 1, testutil.ToFloat64(foreign.WithLabelValues("ns", "operator", "s1", "patch", "observed")))
}

func TestFenceByObject(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(r *upstream.Request) upstream.Response {
		name := strings.Split(r.Target, "/")[4]
		code := 200
		if name == "gone" {
			code = 404
		}
		return response(code, typeJSON, fmt.Sprintf(`{"metadata":{"name":%q,"uid":%q}}`, name, name))
	}
	m.policy(policytest.ByObject("nodes"))
	for _, q := range []struct {
		method, target, body string
		want, asked          int
	}{
		{"GET", "/api/v1/nodes/mine", "", 200, 1},
		{"GET", "/api/v1/nodes/theirs", "", 403, 1},
		{"HEAD", "/api/v1/nodes/theirs", "", 403, 1},
		{"PUT", "/api/v1/nodes/mine", "{}", 200, 2},
		{"PUT", "/api/v1/nodes/theirs", "{}", 403, 1},
		{"PATCH", "/api/v1/nodes/theirs/status", "{}", 403, 1},
		{"PATCH", "/api/v1/nodes/gone", "{}", 404, 2},
		{"DELETE", "/api/v1/nodes/mine", "", 200, 2},
		{"DELETE", "/api/v1/nodes", "", 403, 0},
	} {
		before := len(m.requests)
		require.Equal(t, q.want, m.do(q.method, q.target, q.body).code, "%s %s", q.method, q.target)
		got := m.requests[before:]
		require.Len(t, got, q.asked, "%s %s", q.method, q.target)
		if q.asked == 2 {
			require.Equal(t, partial, got[0].Header.Get("Accept"))
		}
		if q.method == "DELETE" && q.asked == 2 {
			require.JSONEq(t, `{"kind":"DeleteOptions","apiVersion":"v1","preconditions":{"uid":"mine"}}`, got[1].Body)
		}
	}
}

// Under observe nothing is refused or altered, also what cannot be distinguished.
func TestObserveByObjectPassesUndecidedRequests(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(r *upstream.Request) upstream.Response {
		if r.Header.Get("Accept") == partial { // a client that may patch need not be one that may get
			return response(403, typeJSON, `{"kind":"Status","status":"Failure","code":403,"reason":"Forbidden"}`)
		}
		return response(200, typeJSON, "{}")
	}
	s := policytest.ByObject("nodes")
	s.Isolation = meshv1.Isolation_ISOLATION_OBSERVE
	m.policy(s)
	for _, method := range []string{"GET", "PATCH", "DELETE"} {
		require.Equal(t, 200, m.do(method, "/api/v1/nodes/a?includeObject=None", "", "Accept", "application/cbor").code, method)
		got := m.last()
		require.Equal(t, "application/cbor", got.Header.Get("Accept"))
		require.Equal(t, "/api/v1/nodes/a?includeObject=None", got.URI)
		require.Empty(t, got.Body)
		require.EqualValues(t, 1, testutil.ToFloat64(m.env.Metrics.Foreign.WithLabelValues("ns", "operator", "s1", strings.ToLower(method), "unknown")))
	}
	o := policytest.Owning("mine")
	o.Isolation = meshv1.Isolation_ISOLATION_OBSERVE
	m.policy(o)
	for _, header := range [][]string{{"Content-Type", "application/yaml"}, {"Content-Encoding", "gzip"}} {
		require.Equal(t, 200, m.do("POST", "/api/v1/namespaces", "metadata: {name: x}", header...).code)
		require.Equal(t, "metadata: {name: x}", m.last().Body)
	}
	m.policy(policytest.Owning("mine"))
	require.Equal(t, 415, m.do("POST", "/api/v1/namespaces", "metadata: {name: x}", "Content-Type", "application/yaml").code)
}

func TestTableHasTheKeyOfItsRow(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(r *upstream.Request) upstream.Response {
		path, _, _ := strings.Cut(r.Target, "?")
		uid := path[strings.LastIndex(path, "/")+1:]
		return response(200, typeJSON, fmt.Sprintf(`{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":{},"rows":[{"cells":["a"],"object":{"metadata":{"uid":%q}}}]}`, uid))
	}
	s := policytest.ByObject("nodes")
	s.Limits[0].Scope = sharding.Keys("mine", "").Proto() // a Table itself has no uid
	m.policy(s)
	for name, want := range map[string]int{"mine": 200, "theirs": 403} {
		a := m.do("GET", "/api/v1/nodes/"+name+"?includeObject=None", "", "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
		require.Equal(t, want, a.code, "%s: %s", name, a.body)
		require.Equal(t, "/api/v1/nodes/"+name+"?includeObject=Metadata", m.last().URI)
	}
}

func TestForeignObjectIsNotProxiedToByPort(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(r *upstream.Request) upstream.Response {
		switch name := strings.TrimPrefix(r.Target, "/api/v1/namespaces/n/services/"); {
		case name == "mine", name == "theirs":
			return response(200, typeJSON, fmt.Sprintf(`{"metadata":{"uid":%q}}`, name))
		case strings.Contains(name, "/proxy/"):
			return response(200, typeJSON, "")
		}
		return response(404, typeJSON, "")
	}
	m.policy(policytest.ByObject("services"))
	for _, name := range []string{"%s", "%s:80", "%s:web", "http:%s:80", "https:%s:", "http%%3A%s%%3A80"} {
		require.Equal(t, 403, m.do("POST", "/api/v1/namespaces/n/services/"+fmt.Sprintf(name, "theirs")+"/proxy/x", "").code, name)
		require.Equal(t, 200, m.do("POST", "/api/v1/namespaces/n/services/"+fmt.Sprintf(name, "mine")+"/proxy/x", "").code, name)
	}
}

func TestBindingsAreRefusedIfPodsAreDividedByObject(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.policy(policytest.ByObject("pods"))
	require.Equal(t, 403, m.do("POST", "/api/v1/namespaces/n/bindings", `{"metadata":{"name":"mine"}}`).code)
	require.Empty(t, m.requests)
	require.Equal(t, 200, m.do("POST", "/api/v1/namespaces/n/pods", "{}").code)
}

func TestRefusalNamesTheOwner(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(r *upstream.Request) upstream.Response {
		return response(200, typeJSON, fmt.Sprintf(`{"metadata":{"name":"x","uid":%q}}`, r.Target[strings.LastIndex(r.Target, "/")+1:]))
	}
	for _, key := range []meshv1.Key{meshv1.Key_KEY_NAMESPACE, meshv1.Key_KEY_OBJECT} {
		s := policytest.Owning("mine")
		s.Key = key
		refused := func(name string) string {
			target := "/api/v1/namespaces/" + name + "/pods/a"
			if key == meshv1.Key_KEY_OBJECT {
				target = "/api/v1/namespaces/x/pods/" + name
			}
			a := m.do("PATCH", target, "{}")
			require.Equal(t, 403, a.code)
			said := a.status
			require.Equal(t, "pods", said.Details.Kind)
			require.NotEmpty(t, said.Details.Name)
			return said.Message
		}
		m.policy(s)
		require.Contains(t, refused("theirs"), "another shard owns it")
		s.Owners = []*meshv1.Owner{{Shard: "s1", Scope: sharding.Keys("mine").Proto()}, {Shard: "s2", Scope: sharding.Keys("theirs").Proto()}}
		m.policy(s)
		require.Contains(t, refused("theirs"), "shard s2 owns it")
		require.Contains(t, refused("nobodys"), "no shard owns it at the moment")
		s.Owners[0].Scope = sharding.Keys("mine", "released").Proto()
		m.policy(s)
		require.Contains(t, refused("released"), "no shard owns it at the moment")
	}
}

func TestWriteNamesUidOfItsObject(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(*upstream.Request) upstream.Response {
		return response(200, typeJSON, `{"metadata":{"uid":"mine"}}`)
	}
	m.policy(policytest.ByObject("nodes"))
	const merge, patch = "application/merge-patch+json", "application/json-patch+json"
	for _, c := range []struct{ method, path, contentType, body, want string }{
		{"PUT", "a", typeJSON, `{"spec":{},"metadata":{"name":"a"}}`, `{"spec":{},"metadata":{"name":"a","uid":"mine"}}`},
		{"PUT", "a/status", typeJSON, `{}`, `{"metadata":{"uid":"mine"}}`},
		{"PUT", "a", typeJSON, `{"metadata":{"uid":"mine"}}`, `{"metadata":{"uid":"mine"}}`},
		{"PATCH", "a", merge, `{"metadata":{"uid":null}}`, `{"metadata":{"uid":"mine"}}`},
		{"PATCH", "a", "application/apply-patch+yaml", `{}`, `{"metadata":{"uid":"mine"}}`},
		{"PATCH", "a", "application/apply-patch+yaml", `metadata: {}`, `metadata: {}`},
		{"PATCH", "a/scale", merge, `{}`, `{}`},
		{"PATCH", "a", patch, `[]`, `[]`},
		{"DELETE", "a", "", "", `{"kind":"DeleteOptions","apiVersion":"v1","preconditions":{"uid":"mine"}}`},
		{"DELETE", "a", typeJSON, `{"preconditions":{"resourceVersion":"1"}}`, `{"preconditions":{"resourceVersion":"1","uid":"mine"}}`},
	} {
		require.Equal(t, 200, m.do(c.method, "/api/v1/nodes/"+c.path, c.body, "Content-Type", c.contentType).code)
		got := m.last().Body
		if c.want[0] == '{' && len(c.want) > 1 {
			require.JSONEq(t, c.want, got, "%+v", c)
		} else {
			require.Equal(t, c.want, got, "%+v", c)
		}
		seen := len(m.requests)
		if theirs := strings.ReplaceAll(c.body, "mine", "theirs"); theirs != c.body {
			require.Equal(t, 403, m.do(c.method, "/api/v1/nodes/"+c.path, theirs, "Content-Type", c.contentType).code, "%+v", c)
			require.Len(t, m.requests, seen+1, "the look")
		}
	}
	require.Equal(t, 400, m.do("PATCH", "/api/v1/nodes/a", "{", "Content-Type", merge).code, "it has no place for the uid")
}

// confined is a shard that owns pods and namespaces in mine. No shard reads or writes what is
// neither in mine nor in theirs, except what is shared.
func confined(reads bool, isolation meshv1.Isolation) *meshv1.Sharding {
	s := policytest.Owning("mine")
	s.Method, s.ReadAll, s.Isolation = meshv1.Method_METHOD_FILTER, reads, isolation
	s.Limits[0].Within = sharding.Keys("mine", "theirs").Proto()
	s.Shared = []*meshv1.SharedObjects{
		{Resources: s.Limits[0].Resources, Namespaces: []string{"read"}},
		{Resources: s.Limits[0].Resources, Namespaces: []string{"written"}, WriteAll: true},
	}
	return s
}

// The verbs of requests for single objects in each namespace.
var singles = []struct {
	verb, method, path, body string
	reads                    bool
}{
	{"get", "GET", "/api/v1/namespaces/NS/pods/a", "", true},
	{"get a subresource", "GET", "/api/v1/namespaces/NS/pods/a/log", "", true},
	{"get a namespace", "GET", "/api/v1/namespaces/NS", "", true},
	{"create", "POST", "/api/v1/namespaces/NS/pods", `{"metadata":{"name":"a"}}`, false},
	{"create a namespace", "POST", "/api/v1/namespaces", `{"metadata":{"name":"NS"}}`, false},
	{"create a binding", "POST", "/api/v1/namespaces/NS/bindings", `{"metadata":{"name":"a"}}`, false},
	{"create a subresource", "POST", "/api/v1/namespaces/NS/pods/a/eviction", "{}", false},
	{"update", "PUT", "/api/v1/namespaces/NS/pods/a", "{}", false},
	{"update a subresource", "PUT", "/api/v1/namespaces/NS/pods/a/status", "{}", false},
	{"patch", "PATCH", "/api/v1/namespaces/NS/pods/a", "{}", false},
	{"patch a subresource", "PATCH", "/api/v1/namespaces/NS/pods/a/status", "{}", false},
	{"delete", "DELETE", "/api/v1/namespaces/NS/pods/a", "", false},
	{"connect", "GET", "/api/v1/namespaces/NS/pods/a/proxy/x", "", false},
	{"exec", "POST", "/api/v1/namespaces/NS/pods/a/exec", "", false},
}

func TestNoShardReadsOrWritesOutsideTheLimits(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	const enforce, observe, off = meshv1.Isolation_ISOLATION_ENFORCE, meshv1.Isolation_ISOLATION_OBSERVE, meshv1.Isolation_ISOLATION_OFF
	for _, reads := range []bool{true, false} {
		for _, isolation := range []meshv1.Isolation{enforce, observe, off} {
			m.policy(confined(reads, isolation))
			for _, q := range singles {
				for namespace, passes := range map[string]bool{
					"mine":    true,
					"theirs":  isolation != enforce || q.reads && reads,
					"outside": false,
					"read":    q.reads,
					"written": true,
				} {
					fill := func(s string) string { return strings.ReplaceAll(s, "NS", namespace) }
					a := m.do(q.method, fill(q.path), fill(q.body))
					want := 403
					if passes {
						want = 200
					}
					require.Equal(t, want, a.code, "%s in %s, reads: %v, isolation: %v: %s", q.verb, namespace, reads, isolation, a.body)
					if namespace == "outside" {
						require.Contains(t, a.body, "is outside the limits of this pod's shard, ShardingConfig ns/s1")
					}
				}
			}
			require.Equal(t, 403, m.do("POST", "/api/v1/namespaces", `{"metadata":{"generateName":"a"}}`).code)
			require.Equal(t, 200, m.do("PUT", "/api/v1/namespaces/outside/secrets/a", "{}").code, "not limited")
		}
	}
	require.NotZero(t, testutil.ToFloat64(m.env.Metrics.Foreign.WithLabelValues("ns", "operator", "s1", "get", "refused")))
}

func TestStandbyRefusesWritesOfDividedResources(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	const lease = `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"op"}}`
	for _, isolation := range []meshv1.Isolation{meshv1.Isolation_ISOLATION_ENFORCE, meshv1.Isolation_ISOLATION_OBSERVE, meshv1.Isolation_ISOLATION_OFF} {
		for _, key := range []meshv1.Key{meshv1.Key_KEY_NAMESPACE, meshv1.Key_KEY_OBJECT} {
			s := policytest.Standby(meshv1.Method_METHOD_AUTO)
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
				a := m.do(q.method, q.target, q.body)
				require.Equal(t, q.want, a.code, "%v %v %s %s: %s", isolation, key, q.method, q.target, a.body)
				if q.want == 503 {
					said := a.status
					require.Equal(t, metav1.StatusReasonServiceUnavailable, said.Reason)
					require.Equal(t, "1", a.retryAfter())
					require.Contains(t, said.Message, "ShardingConfig ns/s1")
					require.Contains(t, said.Message, "standby")
				} else {
					require.Equal(t, q.target, m.last().URI)
				}
			}
		}
	}
}

func TestStandbyFencesNamespaces(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := policytest.Standby(meshv1.Method_METHOD_AUTO)
	s.FenceNamespaces = true
	m.policy(s)
	require.Equal(t, 503, m.do("PUT", "/api/v1/namespaces/a/secrets/a", "{}").code)
	require.Equal(t, 200, m.do("PUT", "/api/v1/namespaces/ns/secrets/a", "{}").code, "its own namespace")
}

func TestStandbyCutsConnectionsIntoPods(t *testing.T) {
	t.Parallel()
	free := policytest.Standby(meshv1.Method_METHOD_AUTO)
	free.Standby, free.Limits[0].Scope = false, sharding.All().Proto()
	m := newPod(t)
	before := m.policy(free)
	exec := match.Kind{Verb: "create", Subresource: "exec", Resource: "pods"}
	require.False(t, before.Division.Refuses(exec, "a", ""))
	after := m.policy(policytest.Standby(meshv1.Method_METHOD_AUTO))
	require.True(t, after.Division.Refuses(exec, "a", ""))
	require.False(t, after.Division.Refuses(match.Kind{Verb: "get", Resource: "pods"}, "a", ""))
	require.NotContains(t, after.Locks[0].Path("/op", 0), "---")
}
