package metrics

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/ctrlmesh/ctrlmesh/tests/docs"
)

// docs/metrics.md has what a manager serves, with its labels, and nothing else.
func TestMetricsAreDocumented(t *testing.T) {
	registry, ok := metrics.Registry.(prometheus.Collector)
	require.True(t, ok)
	docs.RequireMetrics(t, "../../docs/metrics.md", "## Manager", registry)
}
