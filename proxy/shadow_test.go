package proxy

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// shadowing is a shard whose writes do not take effect.
func shadowing(window time.Duration) *meshv1.Sharding {
	s := locked("s1")
	s.Shadow = &meshv1.Shadow{WindowNs: int64(window), IgnoredFields: []string{"status.at"}}
	return s
}

func TestWritesOfAShadowAreDryRuns(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(shadowing(time.Second))
	c := m.client(true)
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
		require.Equal(t, http.StatusOK, m.with(c, q.method, q.target, q.body).StatusCode, "%s %s", q.method, q.target)
		got := lastOf(t, api, q.method)
		_, query, _ := strings.Cut(got.URI, "?")
		require.Equal(t, q.query, query, "%s %s", q.method, q.target)
		require.Equal(t, q.body, got.Body, "%s %s", q.method, q.target)
	}

	m.with(c, "DELETE", "/api/v1/namespaces/a/pods/x", `{"propagationPolicy":"Orphan"}`)
	require.JSONEq(t, `{"propagationPolicy":"Orphan","dryRun":["All"]}`, lastOf(t, api, "DELETE").Body, "the apiserver reads the body, and not the query")

	before := writesOf(api)
	for _, q := range [][2]string{
		{"POST", "/api/v1/namespaces/a/pods/x/exec"}, {"GET", "/api/v1/namespaces/a/pods/x/exec"}, {"GET", "/api/v1/namespaces/a/services/x/proxy/"},
		{"PUT", "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/x/start"}, {"POST", "/elsewhere"},
	} {
		a := m.with(c, q[0], q[1], "{}")
		require.Equal(t, http.StatusForbidden, a.StatusCode, "%v", q)
		require.Contains(t, a.body, "the pod is a shadow, see spec.shadow of ShardingConfig ns/s1")
	}
	require.Equal(t, http.StatusUnsupportedMediaType, m.with(c, "DELETE", "/api/v1/namespaces/a/pods/x", "dryRun: []", "Content-Type", "application/yaml").StatusCode)
	require.Equal(t, before, writesOf(api))
}

// lastOf returns the last request with a method: the proxy reads objects, too.
func lastOf(t *testing.T, api *recorder, method string) seen {
	all := slices.DeleteFunc(api.requests(), func(s seen) bool { return s.Method != method })
	require.NotEmpty(t, all)
	return all[len(all)-1]
}

// writesOf returns the number of requests that are no reads.
func writesOf(api *recorder) int {
	return len(slices.DeleteFunc(api.requests(), func(s seen) bool { return s.Method == http.MethodGet }))
}

func TestShadowLeadsUnderItsOwnLock(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(shadowing(time.Second))
	lock := "/apis/coordination.k8s.io/v1/namespaces/leases/leases/leases"
	body := `{"metadata":{"name":"leases","namespace":"leases"},"spec":{"holderIdentity":"pod"}}`
	m.do("PUT", lock, body)
	require.Equal(t, lock+"---s1", lastOf(t, api, "PUT").URI)

	standby := shadowing(time.Second)
	standby.Standby, standby.Locks[0].UpstreamName = true, "leases"
	m.policy(standby)
	m.do("PUT", "/api/v1/nodes/x", "{}")
	require.Equal(t, "/api/v1/nodes/x?dryRun=All", lastOf(t, api, "PUT").URI, "a resource that the shards do not divide")
}

func TestShadowIsComparedWithOthers(t *testing.T) {
	t.Parallel()
	const token = "Bearer of-the-shadow"
	object := func(version, replicas int, at string) map[string]any {
		return map[string]any{
			"metadata": map[string]any{"name": "x", "uid": "u", "resourceVersion": strconv.Itoa(version)},
			"spec":     map[string]any{"replicas": replicas}, "status": map[string]any{"at": at},
		}
	}
	stored := make(chan map[string]any, 1)
	stored <- object(1, 1, "")
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		is := <-stored
		stored <- is
		switch {
		case r.Method == http.MethodGet && r.Header.Get("Authorization") == token:
		case r.Method == http.MethodGet:
			w.WriteHeader(http.StatusUnauthorized)
		case r.URL.Query().Get("dryRun") != "All":
			w.WriteHeader(http.StatusTeapot)
		default:
			is = object(1, 3, "now")
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(is)
	})
	m := newMesh(t, api)
	m.policy(shadowing(10 * time.Second))
	a := m.do("PATCH", "/apis/apps/v1/namespaces/a/deployments/x", `{"spec":{"replicas":3}}`, "Authorization", token, "Accept", "application/vnd.kubernetes.protobuf, */*")
	require.Equal(t, http.StatusOK, a.StatusCode)
	require.Contains(t, a.body, `"replicas":3`, "what it would be")
	require.Zero(t, m.pod.Shadow().GetAgreed())
	<-stored
	stored <- object(2, 3, "later") // others make the same change
	require.Eventually(t, func() bool { return m.pod.Shadow().GetAgreed() == 1 }, 30*time.Second, 10*time.Millisecond)

	m.policy(shadowing(100 * time.Millisecond))
	<-stored
	stored <- object(1, 1, "")
	m.do("PUT", "/apis/apps/v1/namespaces/a/deployments/x", `{}`, "Authorization", token)
	require.Eventually(t, func() bool { return m.pod.Shadow().GetDiffered() == 1 }, 30*time.Second, 10*time.Millisecond)
	require.Equal(t, []string{"spec.replicas"}, m.pod.Shadow().GetDifferences()[0].GetFields())

	m.policy(locked("s1"))
	require.Nil(t, m.pod.Shadow())
}
