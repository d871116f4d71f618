package proxy

import (
	"encoding/json"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// shadowing is a shard whose writes do not take effect.
func shadowing(window time.Duration) *meshv1.Sharding {
	s := policytest.Locked("s1")
	s.Shadow = &meshv1.Shadow{WindowNs: int64(window), IgnoredFields: []string{"status.at"}}
	return s
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

	m.policy(policytest.Locked("s1"))
	require.Nil(t, m.pod.Shadow())
}
