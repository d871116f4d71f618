package status

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

func TestShadowsOfAllPodsAreAdded(t *testing.T) {
	in := input(fine, pod("a"), pod("b"), pod("c"))
	in.Locks = []v1alpha1.LockStatus{{Namespace: "ns", Name: "op", Holder: "outside"}}
	require.Nil(t, Of(in).Shadow)
	require.Zero(t, Of(in).ReadyMembers, "they wait for the lock")

	in.Shard.Config.Spec.Shadow = &v1alpha1.Shadow{}
	require.Equal(t, &v1alpha1.ShadowStatus{}, Of(in).Shadow)
	reports := map[string]*push.Shadow{
		"a": {Agreed: 1, Differed: 2, Refused: 3, Uncompared: 4, Differences: []push.ShadowDifference{
			{Group: "apps", Resource: "deployments", Verb: "update", Fields: []string{"spec.b", "spec.a"}, Writes: 2},
		}},
		"b": {Agreed: 10, Differences: []push.ShadowDifference{
			{Group: "apps", Resource: "deployments", Verb: "update", Fields: []string{"spec.c", "spec.a"}, Writes: 1},
			{Resource: "configmaps", Verb: "delete", Writes: 1},
		}},
	}
	in.Observe = func(_, uid string) push.Observation {
		o := fine
		o.Shadow = reports[uid]
		return o
	}
	require.Equal(t, &v1alpha1.ShadowStatus{Agreed: 11, Differed: 2, Refused: 3, Uncompared: 4, Differences: []v1alpha1.ShadowDifference{
		{Resource: "configmaps", Verb: "delete", Writes: 1},
		{Group: "apps", Resource: "deployments", Verb: "update", Writes: 3, Fields: []string{"spec.a", "spec.b", "spec.c"}},
	}}, Of(in).Shadow)
	require.EqualValues(t, 3, Of(in).ReadyMembers, "another pod may hold the operator lock")
}
