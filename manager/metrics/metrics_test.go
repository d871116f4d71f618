package metrics

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/ctrlmesh/ctrlmesh/tests/docs"
)

// docs/metrics.md lists the metrics of the manager with their labels, and no others.
func TestMetricsAreDocumented(t *testing.T) {
	registry, ok := metrics.Registry.(prometheus.Collector)
	require.True(t, ok)
	docs.RequireMetrics(t, "../../docs/metrics.md", "## Manager", registry)
}
