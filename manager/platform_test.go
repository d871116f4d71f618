package manager

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

func TestInvalidPlatformSettingsChangeNothing(t *testing.T) {
	w, _ := newWorld(t, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: platform.ConfigMap},
		Data:       map[string]string{platform.Key: "stamping: {excludedResources: [pods]}"},
	})
	pods := schema.GroupResource{Resource: "pods"}
	require.False(t, w.settings.Load().Stamps(pods), "read before anything is served")

	w.adoptPlatform(map[string]string{platform.Key: "stamping: {excludedResource: []}"})
	require.False(t, w.settings.Load().Stamps(pods))

	w.adoptPlatform(nil)
	require.Equal(t, platform.Default(), w.settings.Load())
}

func TestInvalidPlatformSettingsAtTheStartAreTheDefaults(t *testing.T) {
	w, _ := newWorld(t, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: platform.ConfigMap},
		Data:       map[string]string{"settings": ""},
	})
	require.Equal(t, platform.Default(), w.settings.Load())
}
