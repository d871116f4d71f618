package stages

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

func TestLimitsRefuseNothingInADryRun(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := confined(true, meshv1.Isolation_ISOLATION_OBSERVE)
	s.DryRun = true
	m.policy(s)
	require.Equal(t, 200, m.do("GET", "/api/v1/namespaces/outside/pods/a", "").code)
	require.Equal(t, 200, m.do("PUT", "/api/v1/namespaces/theirs/pods/a", "{}").code)
	counted := func(verb string) float64 {
		return testutil.ToFloat64(m.env.Metrics.DryRun.WithLabelValues("ns", "operator", "s1", verb, "refused"))
	}
	require.EqualValues(t, 1, counted("get"))
	require.Zero(t, counted("update"), "isolation Observe passes it")
}

func TestDryRunChangesNothing(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.api = func(*upstream.Request) upstream.Response {
		return response(200, typeJSON, `{"metadata":{"name":"x","uid":"theirs"}}`)
	}
	const leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
	lease := `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"op"}}`
	counted := map[string]int{}
	for _, key := range []meshv1.Key{meshv1.Key_KEY_NAMESPACE, meshv1.Key_KEY_OBJECT} {
		s := policytest.Owning("mine")
		s.Key, s.Method, s.DryRun, s.FenceNamespaces = key, meshv1.Method_METHOD_AUTO, true, true
		s.Locks = []*meshv1.Lock{{Namespace: "kube-system", Name: "op", UpstreamName: "op---s1"}}
		m.policy(s)
		for _, q := range []struct{ method, target, body, byNamespace, byObject string }{
			{"GET", "/api/v1/pods", "", "narrowed", "narrowed"},
			{"GET", "/api/v1/pods?watch=1", "", "narrowed", "narrowed"},
			{"GET", "/api/v1/namespaces/mine/pods", "", "", "narrowed"},
			{"GET", "/api/v1/namespaces/theirs/pods?limit=1", "", "narrowed", "narrowed"},
			{"DELETE", "/api/v1/namespaces/theirs/pods", "", "narrowed", "refused"},
			{"GET", "/api/v1/namespaces/theirs/pods/a", "", "refused", "refused"},
			{"PUT", "/api/v1/namespaces/theirs/pods/a", "{}", "refused", "refused"},
			{"POST", "/api/v1/namespaces", `{"metadata":{"name":"theirs"}}`, "refused", ""},
			{"PUT", "/api/v1/namespaces/mine/pods/a", "{}", "", "refused"},
			{"PUT", "/api/v1/namespaces/theirs/secrets/a", "{}", "refused", ""},
			{"GET", "/api/v1/namespaces/theirs/secrets", "", "", ""},
			{"GET", leases + "/op", "", "renamed", "renamed"},
			{"PUT", leases + "/op", lease, "renamed", "renamed"},
			{"POST", leases, lease, "renamed", "renamed"},
			{"GET", leases + "?fieldSelector=metadata.name%3Dop", "", "renamed", "renamed"},
			{"PUT", leases + "/other", recordJSON, "renamed", "renamed"}, // when it is discovered
		} {
			want := q.byNamespace
			if key == meshv1.Key_KEY_OBJECT {
				want = q.byObject
			}
			before := len(m.requests)
			a := m.do(q.method, q.target, q.body, "Accept", "application/yaml")
			require.Equal(t, 200, a.code, "%s %s: %s", q.method, q.target, a.body)
			sent := m.last()
			require.Equal(t, q.target, sent.URI)
			require.Equal(t, q.body, sent.Body)
			require.Equal(t, "application/yaml", sent.Header.Get("Accept"))
			if want == "" {
				continue
			}
			require.LessOrEqual(t, len(m.requests)-before, 2, "one look at most")
			verb := map[string]string{"POST": "create", "PUT": "update", "DELETE": "deletecollection", "GET": "get"}[q.method]
			if want == "narrowed" && q.method == "GET" || strings.Contains(q.target, "fieldSelector") {
				verb = "list"
			}
			if strings.Contains(q.target, "watch=1") {
				verb = "watch"
			}
			counted[verb+" "+want]++
			require.EqualValues(t, counted[verb+" "+want], testutil.ToFloat64(m.env.Metrics.DryRun.WithLabelValues("ns", "operator", "s1", verb, want)), "%s %s", q.method, q.target)
		}
	}
	seen := m.observed()
	require.Len(t, seen, 1)
	require.Equal(t, "other", seen[0].Name, "reported, and not refused")
}

func TestDryRunOfStandbyIsInvalid(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	s := policytest.Standby(meshv1.Method_METHOD_AUTO)
	s.DryRun = true
	_, err := Compile(m.env, &meshv1.PodPolicy{Version: "2", Sharding: s})
	require.Error(t, err)
}
