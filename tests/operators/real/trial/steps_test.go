package trial

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// A status that has reported a problem since a change was made is not silent about it.
func TestReportsReadyOnlyAfterAWhile(t *testing.T) {
	of := func(conditions ...metav1.Condition) *meshv1alpha1.ShardingConfig {
		return &meshv1alpha1.ShardingConfig{Status: meshv1alpha1.ShardingConfigStatus{Conditions: conditions}}
	}
	ready := func(status metav1.ConditionStatus, ago time.Duration) metav1.Condition {
		return metav1.Condition{Type: meshv1alpha1.ConditionReady, Status: status, LastTransitionTime: metav1.NewTime(time.Now().Add(-ago))}
	}
	missing := metav1.Condition{Type: meshv1alpha1.ConditionLeaderMissing, Status: metav1.ConditionTrue}
	require.True(t, reportsReady(of(ready(metav1.ConditionTrue, 2*time.Minute)), time.Minute))
	require.False(t, reportsReady(of(ready(metav1.ConditionTrue, time.Second)), time.Minute), "it has reported a problem until then")
	require.False(t, reportsReady(of(ready(metav1.ConditionFalse, 2*time.Minute)), time.Minute))
	require.False(t, reportsReady(of(ready(metav1.ConditionTrue, 2*time.Minute), missing), time.Minute))
	missing.Status, missing.LastTransitionTime = metav1.ConditionFalse, metav1.NewTime(time.Now().Add(-time.Second))
	require.False(t, reportsReady(of(ready(metav1.ConditionTrue, 2*time.Minute), missing), time.Minute), "it has reported a problem until then")
	require.False(t, reportsReady(of(), time.Minute))
}

func TestMissingAdvice(t *testing.T) {
	a := &Advice{Divide: []string{"pods", "apps/deployments"}}
	require.Equal(t, []string{"services", "batch/jobs"}, a.missing([]meshv1alpha1.ResourceGroup{resources("", "pods", "services"), resources("apps", "deployments"), resources("batch", "jobs")}))
}
