package stages

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// newDraining is a pod that drains: comparisons end at once.
func newDraining(t *testing.T) *pod {
	m := newPod(t)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	m.env.Draining = gone
	return m
}

// shadowing is a shard whose writes do not take effect.
func shadowing() *meshv1.Sharding {
	s := policytest.Locked("s1")
	s.Shadow = &meshv1.Shadow{WindowNs: int64(time.Second)}
	return s
}

func TestWritesOfAShadowAreDryRuns(t *testing.T) {
	t.Parallel()
	m := newDraining(t)
	m.policy(shadowing())
	for _, q := range []struct{ method, target, body, query string }{
		{"GET", "/api/v1/namespaces/a/pods/x", "", ""},
		{"GET", "/api/v1/pods?watch=1&limit=1", "", "watch=1&limit=1"},
		{"POST", "/api/v1/namespaces/a/pods", `{"metadata":{"name":"x"}}`, "dryRun=All"},
		{"POST", "/api/v1/namespaces/a/events?fieldManager=op", `{"metadata":{"generateName":"x"}}`, "fieldManager=op&dryRun=All"},
		{"PUT", "/api/v1/namespaces/a/pods/x/status", `{}`, "dryRun=All"},
		{"PATCH", "/api/v1/namespaces/a/pods/x?dryRun=None&dryRun=All", `{}`, "dryRun=All"},
		{"POST", "/api/v1/namespaces/a/pods/x/eviction", `{}`, "dryRun=All"},
		{"POST", "/api/v1/namespaces/a/bindings", `{}`, "dryRun=All"},
		{"DELETE", "/api/v1/namespaces/a/pods/x", "", "dryRun=All"},
		{"DELETE", "/api/v1/namespaces/a/pods?labelSelector=a", "", "labelSelector=a&dryRun=All"},
		{"POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", `{}`, ""},
	} {
		require.Equal(t, http.StatusOK, m.do(q.method, q.target, q.body).code, "%s %s", q.method, q.target)
		got := m.last()
		_, query, _ := strings.Cut(got.URI, "?")
		require.Equal(t, q.query, query, "%s %s", q.method, q.target)
		require.Equal(t, q.body, got.Body, "%s %s", q.method, q.target)
	}

	m.do("DELETE", "/api/v1/namespaces/a/pods/x", `{"propagationPolicy":"Orphan"}`)
	require.JSONEq(t, `{"propagationPolicy":"Orphan","dryRun":["All"]}`, m.last().Body, "the apiserver reads the body, and not the query")

	before := len(m.requests)
	for _, q := range [][2]string{
		{"POST", "/api/v1/namespaces/a/pods/x/exec"}, {"GET", "/api/v1/namespaces/a/pods/x/exec"}, {"GET", "/api/v1/namespaces/a/services/x/proxy/"},
		{"PUT", "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/x/start"}, {"POST", "/elsewhere"},
	} {
		a := m.do(q[0], q[1], "{}")
		require.Equal(t, http.StatusForbidden, a.code, "%v", q)
		require.Contains(t, a.body, "the pod is a shadow, see spec.shadow of ShardingConfig ns/s1")
	}
	require.Equal(t, http.StatusUnsupportedMediaType, m.do("DELETE", "/api/v1/namespaces/a/pods/x", "dryRun: []", "Content-Type", "application/yaml").code)
	require.Len(t, m.requests, before)
}

func TestShadowLeadsUnderItsOwnLock(t *testing.T) {
	t.Parallel()
	m := newDraining(t)
	m.policy(shadowing())
	lock := "/apis/coordination.k8s.io/v1/namespaces/leases/leases/leases"
	body := `{"metadata":{"name":"leases","namespace":"leases"},"spec":{"holderIdentity":"pod"}}`
	m.do("PUT", lock, body)
	require.Equal(t, lock+"---s1", m.last().URI)

	standby := shadowing()
	standby.Standby, standby.Locks[0].UpstreamName = true, "leases"
	m.policy(standby)
	m.do("PUT", "/api/v1/nodes/x", "{}")
	require.Equal(t, "/api/v1/nodes/x?dryRun=All", m.last().URI, "a resource that the shards do not divide")
}
