package roots

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// The increase of a series that begins with one is zero, so an alert would miss the first.
func TestHandoversAreCountedFromZero(t *testing.T) {
	t.Parallel()
	of := prometheus.Labels{"namespace": "counted-from-zero", "shardingconfig": "op"}
	t.Cleanup(func() { metrics.ForgetRoot(of["namespace"], of["shardingconfig"]) })
	config := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: of["namespace"], Name: of["shardingconfig"]}}
	var r rootMetrics
	r.set(config, decide.Decision{}, time.Now())
	require.Equal(t, 2, metrics.Handovers.DeletePartialMatch(of), "settled and blocked")

	r.set(config, decide.Decision{Events: []decide.Event{{Reason: decide.HandoverBlocked}}}, time.Now())
	require.InDelta(t, 1, testutil.ToFloat64(metrics.Handovers.WithLabelValues(of["namespace"], of["shardingconfig"], "blocked")), 0)
}
