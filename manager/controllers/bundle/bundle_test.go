package bundle

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
)

func TestConfigurationNeedsItsBundleBeforeItsPods(t *testing.T) {
	closed := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "closed"}}
	open := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "open"}}
	open.Spec.FailurePolicy = v1alpha1.FailOpen
	require.Equal(t, map[need]bool{
		{"closed", inject.MeshBundle}: true,
		{"open", inject.BothBundle}:   true,
	}, needsOf(nil, []*v1alpha1.ShardingConfig{closed, open}))
}
