package proxy

import (
	"net/http"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

func TestLatencyOfAnsweredRequestsIsReported(t *testing.T) {
	t.Parallel()
	const delay = 50 * time.Millisecond
	m := newMesh(t, &recorder{then: func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(delay)
		if r.URL.Path == "/api/v1/namespaces/mine/pods/broken" {
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write([]byte(`{}`))
	}})
	m.policy(policytest.Owning("mine"))
	require.Equal(t, http.StatusOK, m.do("GET", "/api/v1/namespaces/mine/pods/a", "").StatusCode)
	require.Equal(t, http.StatusOK, m.do("PUT", "/api/v1/namespaces/mine/pods/a", `{}`).StatusCode)
	require.Equal(t, http.StatusForbidden, m.do("PUT", "/api/v1/namespaces/others/pods/a", `{}`).StatusCode, "by the mesh")
	require.Equal(t, http.StatusBadGateway, m.do("GET", "/api/v1/namespaces/mine/pods/broken", "").StatusCode)
	m.do("GET", "/api/v1/namespaces/mine/pods?watch=true", "")
	require.Eventually(t, func() bool { return m.pod.Outcomes().GetRequests() == 5 }, 10*time.Second, time.Millisecond)
	out := m.pod.Outcomes()
	require.EqualValues(t, 2, out.GetAnswered())
	require.GreaterOrEqual(t, out.GetLatencyMicros(), uint64(2*delay/time.Microsecond))
	var counted float64
	for _, verb := range []string{"get", "update", "watch"} {
		counted += testutil.ToFloat64(m.server.metrics.Meters(m.pod.env.Policy.Load().Tally.Metrics, verb, "pods").Apiserver)
	}
	require.InDelta(t, float64(out.GetLatencyMicros()), counted*1e6, 1, "of the same requests")
}
