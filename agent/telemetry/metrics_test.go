package telemetry

import (
	"crypto/tls"
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/proxy"
	"github.com/ctrlmesh/ctrlmesh/tests/docs"
)

func TestRefusedConnectionsAreCounted(t *testing.T) {
	m := NewMetrics(prometheus.NewRegistry())
	m.RefusedCapture(capture.Stranger)
	require.Equal(t, 1.0, testutil.ToFloat64(m.refused.WithLabelValues("stranger")))
	require.Equal(t, 0.0, testutil.ToFloat64(m.refused.WithLabelValues("queue_full")))
}

func TestManagerConnectedMetric(t *testing.T) {
	r := prometheus.NewRegistry()
	inStep := false
	RegisterConnected(r, func() bool { return inStep })
	for _, now := range []bool{false, true, false} {
		inStep = now
		require.NoError(t, testutil.GatherAndCompare(r, strings.NewReader(fmt.Sprintf(`
# HELP ctrlmesh_agent_manager_connected 1 while this agent is connected to a manager and has all policies. The last policies apply otherwise.
# TYPE ctrlmesh_agent_manager_connected gauge
ctrlmesh_agent_manager_connected %v
`, number(now)))))
	}
}

// docs/metrics.md has what an agent serves, with its labels, and nothing else.
func TestMetricsAreDocumented(t *testing.T) {
	registry := prometheus.NewRegistry()
	NewMetrics(registry)
	RegisterConnected(registry, func() bool { return true })
	_, err := proxy.New(proxy.Config{Registerer: registry, Leaf: func() (*tls.Certificate, error) { return nil, nil }})
	require.NoError(t, err)
	docs.RequireMetrics(t, "../../docs/metrics.md", "## Agent", registry)
}
