package compile

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestExcludedLocksAreNotThoseOfTheOperator(t *testing.T) {
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op"}, Spec: v1alpha1.ShardingConfigSpec{Controller: &v1alpha1.ControllerConfig{
		LeaderElectionName: "elector",
		ExcludedLocks:      []v1alpha1.ExcludedLock{{Namespace: "shared", Name: "mutex"}, {Namespace: "shared", Name: "node-*"}},
	}}}
	name := func(namespace, name string) types.NamespacedName {
		return types.NamespacedName{Namespace: namespace, Name: name}
	}
	var known []v1alpha1.LockStatus
	for _, l := range []types.NamespacedName{name("shared", "mutex"), name("shared", "node-1"), name("shared", "node"), name("ns", "mutex")} {
		known = append(known, v1alpha1.LockStatus{Namespace: l.Namespace, Name: l.Name, Discovered: true, HeldByMesh: true})
	}
	own := []types.NamespacedName{name("ns", "elector"), name("shared", "node"), name("ns", "mutex")}
	require.Equal(t, own, OperatorLocks(c, known))
	require.False(t, ExcludesLock(&v1alpha1.ShardingConfig{}, name("shared", "mutex")))

	byHand, problem := render(c, Root{Locks: known}, objectLimits{})
	require.Nil(t, problem)
	standby, problem := render(c, Root{Locks: known, Standby: "why"}, objectLimits{})
	require.Nil(t, problem)
	c.Spec.Root = &v1alpha1.RootConfig{}
	derived := (&root{config: c}).sharding("op-1-normal")
	for _, s := range []*meshv1.Sharding{byHand, standby, derived} {
		require.Len(t, s.GetExcludedLocks(), 2)
		require.Equal(t, "node-*", s.GetExcludedLocks()[1].GetName())
	}
}
