package roots

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// Members that trust the cluster's CA could go around the mesh.
func TestMembersThatTrustBothAreReplacedUnderClosed(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.FailurePolicy = v1alpha1.FailOpen })
	p := m.pod(0)
	p.Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth
	require.NoError(t, m.Update(t.Context(), p))
	m.settle()
	require.NotEmpty(t, m.shardOf(p))
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.FailurePolicy = v1alpha1.FailClosed })
	m.settle()
	require.True(t, apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKeyFromObject(p), p)), "it was evicted")
}

// An annotation can be changed after admission, the volumes of a pod cannot.
func TestPodThatMountsTheClustersCADoesNotJoin(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	m.refuseEvictions()
	p := m.pod(0)
	p.Spec.Volumes = []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		Sources: []corev1.VolumeProjection{{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: compile.BothBundle}}}},
	}}}}
	require.NoError(t, m.Update(t.Context(), p))
	m.settle()
	require.Empty(t, m.shardOf(p))
}
