package manager

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/crdschema"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
)

// Objects of a kind that the manager does not watch would have no effect, without a word.
func TestEachDefinitionIsWatched(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, errors.Join(v1alpha1.AddToScheme(scheme), serve.AddToScheme(scheme)))
	for _, dialects := range []bool{true, false} {
		var defined, watched []schema.GroupVersionKind
		for _, name := range crdschema.Names() {
			d, err := crdschema.Definition(name)
			require.NoError(t, err)
			require.Len(t, d.Spec.Versions, 1)
			if dialects || d.Spec.Group == v1alpha1.GroupName {
				defined = append(defined, schema.GroupVersionKind{Group: d.Spec.Group, Version: d.Spec.Versions[0].Name, Kind: d.Spec.Names.Kind})
			}
		}
		for o := range cacheOptions("mesh", dialects).ByObject {
			if gvk, err := apiutil.GVKForObject(o, scheme); err == nil && scheme.Recognizes(gvk) {
				watched = append(watched, gvk)
			}
		}
		require.ElementsMatch(t, defined, watched)
	}
}

func TestSlimPod(t *testing.T) {
	out, err := slimPod(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: map[string]string{v1alpha1.TrustAnnotation: "mesh", v1alpha1.EgressTrustAnnotation: "true", "secret": "x"}},
		Spec:       corev1.PodSpec{NodeName: "n", Containers: []corev1.Container{{Name: "c"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: corev1.ConditionTrue, Reason: "x"},
		}, InitContainerStatuses: []corev1.ContainerStatus{{Name: "i", RestartCount: 1}}, ContainerStatuses: []corev1.ContainerStatus{{Name: "c", RestartCount: 2}}},
	})
	require.NoError(t, err)
	require.Equal(t, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: map[string]string{v1alpha1.TrustAnnotation: "mesh", v1alpha1.EgressTrustAnnotation: "true"}},
		Spec:       corev1.PodSpec{NodeName: "n"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			ContainerStatuses: []corev1.ContainerStatus{{RestartCount: 3}}},
	}, out)
}

// The annotation can be changed; what is mounted cannot.
func TestSlimPodTrustsWhatItMounts(t *testing.T) {
	bundle := &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: compile.BothBundle}}
	for _, volumes := range [][]corev1.Volume{nil, {{Name: "ca", VolumeSource: corev1.VolumeSource{ConfigMap: bundle}}}} {
		out, err := slimPod(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh}},
			Spec:       corev1.PodSpec{Volumes: volumes},
		})
		require.NoError(t, err)
		require.Equal(t, volumes == nil, compile.Exclusive(out.(*corev1.Pod)))
	}
}
