package origin

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

func object(kind schema.GroupVersionKind, name string, age int64) *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.NewTime(time.Unix(-age, 0))}}
	c.SetGroupVersionKind(kind)
	return c
}

func TestNames(t *testing.T) {
	untyped := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a"}}
	native, kridge, app := object(Native, "a", 0), object(Kridge, "a", 0), object(VirtualApp, "a", 0)
	require.Equal(t, Of(untyped), Of(native))
	require.NotEqual(t, Of(native), Of(kridge))
	require.NotEqual(t, Of(kridge), Of(app))
	require.Equal(t, "ShardingConfig ns/a", Of(untyped).String())
	require.Equal(t, "ShardingConfig a", Describe(native))
	require.Equal(t, "ShardingConfig.kridge.kusionstack.io a", Describe(kridge))
	require.Equal(t, "VirtualApp ns/a", Of(app).String())
}

func TestConflicts(t *testing.T) {
	native, kridge, app := object(Native, "a", 0), object(Kridge, "a", 9), object(VirtualApp, "a", 8)
	older, newer, alone := object(Kridge, "b", 9), object(VirtualApp, "b", 8), object(VirtualApp, "c", 0)
	Conflicts([]*v1alpha1.ShardingConfig{app, kridge, native, newer, older, alone})
	require.Contains(t, Problem(kridge), "ShardingConfig a has the same name")
	require.Contains(t, Problem(app), "ShardingConfig a has the same name")
	require.Contains(t, Problem(newer), "ShardingConfig.kridge.kusionstack.io b has the same name")
	for _, c := range []*v1alpha1.ShardingConfig{native, older, alone} {
		require.Empty(t, Problem(c))
	}
}

func TestProblemsOfNativeObjectsAreNoAnnotations(t *testing.T) {
	c := object(Native, "a", 0)
	SetProblem(c, "forged")
	require.Empty(t, Problem(c))
	c.SetGroupVersionKind(Kridge)
	require.Equal(t, "forged", Problem(c))
	SetProblem(c, "")
	require.Empty(t, Problem(c))
}
