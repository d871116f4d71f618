package proxy

import (
	"net/url"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
)

// confined is a shard that owns pods and namespaces in mine. No shard reads or writes what is
// neither in mine nor in theirs, except what is shared.
func confined(reads bool, isolation meshv1.Isolation) *meshv1.Sharding {
	s := owning("mine")
	s.Method, s.ReadAll, s.Isolation = meshv1.Method_METHOD_FILTER, reads, isolation
	s.Limits[0].Within = sharding.Keys("mine", "theirs").Proto()
	s.Shared = []*meshv1.SharedObjects{
		{Resources: s.Limits[0].Resources, Namespaces: []string{"read"}},
		{Resources: s.Limits[0].Resources, Namespaces: []string{"written"}, WriteAll: true},
	}
	return s
}

// The verbs of requests for single objects in each namespace. allowed is for a namespace of
// another shard, with isolation Enforce.
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
	api := &recorder{}
	m := newMesh(t, api)
	c := m.client(true)
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
					a := m.with(c, q.method, fill(q.path), fill(q.body))
					want := 403
					if passes {
						want = 200
					}
					require.Equal(t, want, a.StatusCode, "%s in %s, reads: %v, isolation: %v: %s", q.verb, namespace, reads, isolation, a.body)
					if namespace == "outside" {
						require.Contains(t, a.body, "is outside the limits of this pod's shard, ShardingConfig ns/s1")
					}
				}
			}
			require.Equal(t, 403, m.with(c, "POST", "/api/v1/namespaces", `{"metadata":{"generateName":"a"}}`).StatusCode)
			require.Equal(t, 200, m.with(c, "PUT", "/api/v1/namespaces/outside/secrets/a", "{}").StatusCode, "not limited")
		}
	}
	require.NotZero(t, testutil.ToFloat64(m.server.metrics.Foreign.WithLabelValues("ns", "operator", "s1", "get", "refused")))
}

// Lists, watches and deletecollections find nothing there, also by name.
func TestListsOutsideTheLimitsAreEmpty(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	nothing := isolation.Nothing.String()
	for _, reads := range []bool{true, false} {
		for _, isolation := range []meshv1.Isolation{meshv1.Isolation_ISOLATION_ENFORCE, meshv1.Isolation_ISOLATION_OFF} {
			m.policy(confined(reads, isolation))
			for _, q := range []struct {
				method, query string
				byName        bool
			}{
				{"GET", "", false},
				{"GET", "fieldSelector=metadata.name%3Da", true},
				{"DELETE", "", false},
			} {
				for namespace, empty := range map[string]bool{
					"mine": false, "outside": true, "theirs": !q.byName || !reads, "read": q.method == "DELETE",
				} {
					m.do(q.method, "/api/v1/namespaces/"+namespace+"/pods?"+q.query, "")
					sent, err := url.Parse(api.last(t).URI)
					require.NoError(t, err)
					require.Equal(t, empty, sent.Query().Get("labelSelector") == nothing, "%s %s in %s, reads: %v", q.method, q.query, namespace, reads)
				}
			}
		}
	}
}

func TestLimitsRefuseNothingInADryRun(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	s := confined(true, meshv1.Isolation_ISOLATION_OBSERVE)
	s.DryRun = true
	m.policy(s)
	require.Equal(t, 200, m.do("GET", "/api/v1/namespaces/outside/pods/a", "").StatusCode)
	require.Equal(t, 200, m.do("PUT", "/api/v1/namespaces/theirs/pods/a", "{}").StatusCode)
	counted := func(verb string) float64 {
		return testutil.ToFloat64(m.server.metrics.DryRun.WithLabelValues("ns", "operator", "s1", verb, "refused"))
	}
	require.EqualValues(t, 1, counted("get"))
	require.Zero(t, counted("update"), "isolation Observe passes it")
}
