package compile

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// A pod in standby may not write what its root divides. While that is unknown, it writes to
// its own namespace alone.
func TestStandbyFencesNamespacesWhileResourcesAreUnknown(t *testing.T) {
	for _, undivided := range []bool{false, true} {
		c := &v1alpha1.ShardingConfig{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op", UID: "root"},
			Spec: v1alpha1.ShardingConfigSpec{Root: &v1alpha1.RootConfig{
				Prefix: "op", TargetStatefulSet: "op", Auto: &v1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
				ResourceSelector: []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmap"}}}}},
			}},
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "op-0", UID: "pod", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"},
			Annotations:     map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "op", Controller: new(true)}},
		}}
		r := Compile([]*v1alpha1.ShardingConfig{c}, []*corev1.Pod{pod}, map[origin.Name]Root{origin.Of(c): {Undivided: undivided}}, Rules{})
		s := r.Policies["pod"].GetSharding()
		require.True(t, s.GetStandby())
		require.Equal(t, undivided, s.GetFenceNamespaces())
	}
}
