package manager

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// loadPlatform reads the administrator's settings before anything is served.
func (w *world) loadPlatform(ctx context.Context) error {
	cm := &corev1.ConfigMap{}
	err := w.live.Get(ctx, types.NamespacedName{Namespace: w.Namespace, Name: platform.ConfigMap}, cm)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("reading ConfigMap %s: %w", platform.ConfigMap, err)
	}
	timeout, ok := platform.RequestTimeout(cm.Data)
	if !ok {
		timeout = platform.MaxRequestTimeout
	}
	if w.Settings.Load() == nil {
		w.Settings.Store(platform.Default().WithRequestTimeout(timeout))
	}
	w.adoptPlatform(cm.Data)
	return nil
}

// watchPlatform follows the settings; each replica admits by them.
func (w *world) watchPlatform(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(w.kube, 0, informers.WithNamespace(w.Namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = "metadata.name=" + platform.ConfigMap }))
	adopt := func(o any) {
		if cm, ok := o.(*corev1.ConfigMap); ok {
			w.adoptPlatform(cm.Data)
		}
	}
	if _, err := factory.Core().V1().ConfigMaps().Informer().AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    adopt,
		UpdateFunc: func(_, o any) { adopt(o) },
		DeleteFunc: func(any) { w.resetPlatform() },
	}); err != nil {
		return fmt.Errorf("watching ConfigMap %s: %w", platform.ConfigMap, err)
	}
	factory.StartWithContext(ctx)
	<-ctx.Done()
	factory.Shutdown()
	return nil
}

// adoptPlatform applies settings. Those that are invalid change nothing: what they
// were to forbid is not known.
func (w *world) adoptPlatform(data map[string]string) {
	settings, err := platform.Parse(data)
	if err != nil {
		metrics.PlatformInvalid.Set(1)
		w.Log.Error("keeping the former platform settings", "configmap", w.Namespace+"/"+platform.ConfigMap, "error", err)
		w.raiseRequestTimeout(data)
		return
	}
	w.useSettings(settings)
}

// useSettings puts valid settings into effect.
func (w *world) useSettings(settings *platform.Settings) {
	metrics.PlatformInvalid.Set(0)
	w.Settings.Store(settings)
}

// resetPlatform applies the defaults after the ConfigMap was deleted. The request timeout
// of the apiserver is as before, so that one which is longer stays until the manager ends.
func (w *world) resetPlatform() {
	timeout, defaults := w.RequestTimeout(), platform.Default()
	w.useSettings(defaults.WithRequestTimeout(max(timeout, defaults.APIServer.RequestTimeout.Duration)))
}

// raiseRequestTimeout applies the request timeout of settings that are invalid, if it is
// longer than the one before: a shorter one could give a key two owners.
func (w *world) raiseRequestTimeout(data map[string]string) {
	before := w.Settings.Load()
	if timeout, ok := platform.RequestTimeout(data); ok && timeout > before.APIServer.RequestTimeout.Duration {
		w.Settings.Store(before.WithRequestTimeout(timeout))
	}
}
