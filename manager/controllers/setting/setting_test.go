package setting

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// load returns a controller that has read a ConfigMap.
func load(t *testing.T, cm *corev1.ConfigMap) *Controller {
	t.Helper()
	c := &Controller{Client: fake.NewClientBuilder().WithObjects(cm).Build(), Namespace: "mesh", State: &controllers.State{}, Log: slog.New(slog.DiscardHandler)}
	require.NoError(t, c.Load(t.Context()))
	return c
}

func TestInvalidPlatformSettingsChangeNothing(t *testing.T) {
	w := load(t, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: platform.ConfigMap},
		Data:       map[string]string{platform.Key: "stamping: {excludedResources: [pods]}"},
	})
	pods := schema.GroupResource{Resource: "pods"}
	require.False(t, w.State.Settings.Load().Stamps(pods), "read before anything is served")

	w.adopt(map[string]string{platform.Key: "stamping: {excludedResource: []}"})
	require.False(t, w.State.Settings.Load().Stamps(pods))

	w.adopt(nil)
	require.Equal(t, platform.Default(), w.State.Settings.Load())
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
			w := load(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: platform.ConfigMap}, Data: c.data})
			require.Equal(t, platform.Default().WithRequestTimeout(c.timeout), w.State.Settings.Load())
		})
	}
}

// A timeout that is too short gives keys two owners.
func TestInvalidPlatformSettingsDoNotShortenTheRequestTimeout(t *testing.T) {
	w := load(t, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: platform.ConfigMap},
		Data:       map[string]string{platform.Key: "apiserver: {requestTimeout: 5m}"},
	})
	require.Equal(t, 5*time.Minute, w.State.RequestTimeout())
	w.adopt(map[string]string{platform.Key: "apiserver: {requestTimeout: 1m}\nother: {}"})
	require.Equal(t, 5*time.Minute, w.State.RequestTimeout())
	w.adopt(map[string]string{platform.Key: "apiserver: {requestTimeout: 10m}\nother: {}"})
	require.Equal(t, 10*time.Minute, w.State.RequestTimeout())
	w.reset()
	require.Equal(t, 10*time.Minute, w.State.RequestTimeout())
	w.adopt(map[string]string{platform.Key: "apiserver: {requestTimeout: 1m}"})
	require.Equal(t, time.Minute, w.State.RequestTimeout())
}
