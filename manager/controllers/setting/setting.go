// Package setting follows the administrator's settings.
package setting

import (
	"context"
	"fmt"
	"log/slog"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// Controller applies the settings of the ConfigMap. It runs in each replica.
type Controller struct {
	Client client.Reader
	Kube   kubernetes.Interface
	// Namespace of the mesh.
	Namespace string
	State     *controllers.State
	Log       *slog.Logger
}

// Load reads the administrator's settings before anything is served.
func (c *Controller) Load(ctx context.Context) error {
	cm := &corev1.ConfigMap{}
	err := c.Client.Get(ctx, types.NamespacedName{Namespace: c.Namespace, Name: platform.ConfigMap}, cm)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("reading ConfigMap %s: %w", platform.ConfigMap, err)
	}
	timeout, ok := platform.RequestTimeout(cm.Data)
	if !ok {
		timeout = platform.MaxRequestTimeout
	}
	if c.State.Settings.Load() == nil {
		c.State.Settings.Store(platform.Default().WithRequestTimeout(timeout))
	}
	c.adopt(cm.Data)
	return nil
}

// Watch applies the settings as they change.
func (c *Controller) Watch(ctx context.Context) error {
	return controllers.WatchConfigMap(ctx, c.Kube, c.Namespace, platform.ConfigMap,
		func(cm *corev1.ConfigMap) { c.adopt(cm.Data) }, c.reset)
}

// adopt applies settings. Invalid ones change nothing, because it is unknown what they should
// forbid.
func (c *Controller) adopt(data map[string]string) {
	settings, err := platform.Parse(data)
	if err != nil {
		metrics.PlatformInvalid.Set(1)
		c.Log.Error("invalid platform settings, the former ones apply", "configmap", c.Namespace+"/"+platform.ConfigMap, "error", err)
		// Only a longer request timeout applies: a shorter one could give a key two owners.
		before := c.State.Settings.Load()
		if timeout, ok := platform.RequestTimeout(data); ok && timeout > before.APIServer.RequestTimeout.Duration {
			c.State.Settings.Store(before.WithRequestTimeout(timeout))
		}
		return
	}
	c.use(settings)
}

// use puts valid settings into effect.
func (c *Controller) use(settings *platform.Settings) {
	metrics.PlatformInvalid.Set(0)
	c.State.Settings.Store(settings)
}

// reset applies the defaults after the ConfigMap was deleted. The apiserver has not changed, so a
// longer request timeout applies until the manager exits.
func (c *Controller) reset() {
	timeout, defaults := c.State.RequestTimeout(), platform.Default()
	c.use(defaults.WithRequestTimeout(max(timeout, defaults.APIServer.RequestTimeout.Duration)))
}
