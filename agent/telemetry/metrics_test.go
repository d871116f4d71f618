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

func TestInterruptionsOfReviewsAreCounted(t *testing.T) {
	m := NewMetrics(prometheus.NewRegistry())
	count := func() float64 { return testutil.ToFloat64(m.interruptions.WithLabelValues("ns", "a")) }
	before := false
	for _, step := range []struct {
		routed bool
		want   float64
	}{{false, 0}, {true, 0}, {false, 1}, {false, 1}, {true, 1}, {false, 2}} {
		m.SetRouted("ns", "a", before, step.routed)
		before = step.routed
		require.Equal(t, step.want, count())
	}
	m.Forget("ns", "a")
	require.Zero(t, testutil.CollectAndCount(m.interruptions))
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
