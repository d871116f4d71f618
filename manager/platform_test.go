package manager

import (
	"testing"
	"time"

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
	require.False(t, w.Settings.Load().Stamps(pods), "read before anything is served")

	w.adoptPlatform(map[string]string{platform.Key: "stamping: {excludedResource: []}"})
	require.False(t, w.Settings.Load().Stamps(pods))

	w.adoptPlatform(nil)
	require.Equal(t, platform.Default(), w.Settings.Load())
}

func TestInvalidPlatformSettingsAtTheStartAreTheDefaults(t *testing.T) {
	for name, c := range map[string]struct {
		data    map[string]string
		timeout time.Duration
	}{
		"unknown key":                        {map[string]string{"settings": ""}, platform.MaxRequestTimeout},
		"invalid YAML":                       {map[string]string{platform.Key: "apiserver: {requestTimeout: 5m"}, platform.MaxRequestTimeout},
		"invalid timeout":                    {map[string]string{platform.Key: "apiserver: {requestTimeout: 2h}"}, platform.MaxRequestTimeout},
		"misspelled timeout":                 {map[string]string{platform.Key: "apiserver: {timeout: 5m}"}, platform.MaxRequestTimeout},
		"misspelled section":                 {map[string]string{platform.Key: "apisrver: {requestTimeout: 5m}"}, platform.MaxRequestTimeout},
		"timeout beside an invalid resource": {map[string]string{platform.Key: "apiserver: {requestTimeout: 5m}\nstamping: {excludedResources: [Pods!]}"}, 5 * time.Minute},
		"timeout beside an unknown section":  {map[string]string{platform.Key: "apiserver: {requestTimeout: 5m}\nother: {}"}, 5 * time.Minute},
		"timeout beside an unknown key":      {map[string]string{platform.Key: "apiserver: {requestTimeout: 5m}", "a": ""}, 5 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := newWorld(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: platform.ConfigMap}, Data: c.data})
			require.Equal(t, platform.Default().WithRequestTimeout(c.timeout), w.Settings.Load())
		})
	}
}

// A timeout that is too short gives keys two owners.
func TestInvalidPlatformSettingsDoNotShortenTheRequestTimeout(t *testing.T) {
	w, _ := newWorld(t, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: platform.ConfigMap},
		Data:       map[string]string{platform.Key: "apiserver: {requestTimeout: 5m}"},
	})
	require.Equal(t, 5*time.Minute, w.RequestTimeout())
	w.adoptPlatform(map[string]string{platform.Key: "apiserver: {requestTimeout: 1m}\nother: {}"})
	require.Equal(t, 5*time.Minute, w.RequestTimeout())
	w.adoptPlatform(map[string]string{platform.Key: "apiserver: {requestTimeout: 10m}\nother: {}"})
	require.Equal(t, 10*time.Minute, w.RequestTimeout())
	w.resetPlatform()
	require.Equal(t, 10*time.Minute, w.RequestTimeout())
	w.adoptPlatform(map[string]string{platform.Key: "apiserver: {requestTimeout: 1m}"})
	require.Equal(t, time.Minute, w.RequestTimeout())
}
