package status

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

func TestUnreadyConfigurationsAreCounted(t *testing.T) {
	config := func(name string, ready metav1.ConditionStatus, reason v1alpha1.Reason) *v1alpha1.ShardingConfig {
		return &v1alpha1.ShardingConfig{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
			Status:     v1alpha1.ShardingConfigStatus{Conditions: []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: ready, Reason: string(reason)}}},
		}
	}
	derived := config("derived", metav1.ConditionFalse, "MembersStarting")
	derived.Labels = map[string]string{v1alpha1.RootLabel: "root"}
	countUnready([]*v1alpha1.ShardingConfig{
		config("root", metav1.ConditionFalse, v1alpha1.ReasonHeldOutside), config("ready", metav1.ConditionTrue, "Settled"), derived, {},
	})
	require.Equal(t, 1, testutil.CollectAndCount(metrics.NotReady))
	require.InDelta(t, 1, testutil.ToFloat64(metrics.NotReady.WithLabelValues("ns", "root", string(v1alpha1.ReasonHeldOutside))), 0)
	countUnready([]*v1alpha1.ShardingConfig{config("root", metav1.ConditionTrue, "Settled")})
	require.Zero(t, testutil.CollectAndCount(metrics.NotReady))
}
