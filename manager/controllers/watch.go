package controllers

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"
)

// WatchConfigMap watches the ConfigMaps of a name until the context ends, in all namespaces if
// namespace is empty. It calls changed with each new state. Because it watches by name, it needs
// no permission to read other ConfigMaps.
func WatchConfigMap(ctx context.Context, kube kubernetes.Interface, namespace, name string, changed func(*corev1.ConfigMap), deleted func()) error {
	f := informers.NewSharedInformerFactoryWithOptions(kube, 0, informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = "metadata.name=" + name }))
	handle := func(o any) {
		if cm, ok := o.(*corev1.ConfigMap); ok {
			changed(cm)
		}
	}
	if _, err := f.Core().V1().ConfigMaps().Informer().AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    handle,
		UpdateFunc: func(_, o any) { handle(o) },
		DeleteFunc: func(any) { deleted() },
	}); err != nil {
		return fmt.Errorf("watching ConfigMap %s: %w", name, err)
	}
	f.StartWithContext(ctx)
	<-ctx.Done()
	f.Shutdown()
	return nil
}
