package certificate

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
)

func TestTrustingPodsAreNotKnownBeforeTheFirstPolicies(t *testing.T) {
	c := &Controller{State: &controllers.State{}}
	all := func(*corev1.Pod) bool { return true }
	require.Nil(t, c.trusting(all))
	c.State.Compiled.Store(&controllers.Compiled{Listed: &controllers.Listed{}})
	require.NotNil(t, c.trusting(all))
}
