package e2e

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/operators/real/trial"
)

// Kubernetes' own controllers are adopted in place, sharded, deprived of a leader and
// removed, while their objects change. Until the test ends, the cluster's controller manager
// runs without the controllers under test, so those of other tests may have to wait.
func TestKubeControllerManager(t *testing.T) {
	t.Parallel()
	operator, err := trial.Build(t.Context(), cluster, trial.Find(trial.KubeControllerManager))
	require.NoError(t, err)
	result, err := trial.Run(t.Context(), cluster, operator, trial.Schedule{
		Churn: 3 * time.Second, Sizes: []int32{2}, Kill: true, Say: t.Logf,
	})
	require.NoError(t, err)
	require.Zero(t, result.TwoOwners, "%s: %s", never, result)
	require.True(t, result.OK(), "%s", result)
	require.NotZero(t, result.OutsideWrites, "it was at work before it was adopted")
}
