package manager

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
)

// watchBundles watches the mesh's ConfigMaps in all namespaces, by name, so that
// no other ConfigMap need be readable.
func (w *world) watchBundles(ctx context.Context) error {
	var factories []informers.SharedInformerFactory
	for _, name := range []string{inject.MeshBundle, inject.BothBundle, inject.EgressBundle} {
		f := informers.NewSharedInformerFactoryWithOptions(w.kube, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = "metadata.name=" + name
		}))
		if _, err := f.Core().V1().ConfigMaps().Informer().AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc:    w.bundleChanged,
			UpdateFunc: func(_, o any) { w.bundleChanged(o) },
			DeleteFunc: func(any) { w.Changed.Bundles.Notify() },
		}); err != nil {
			return err
		}
		f.StartWithContext(ctx)
		factories = append(factories, f)
	}
	<-ctx.Done()
	for _, f := range factories {
		f.Shutdown()
	}
	return nil
}

func (w *world) bundleChanged(o any) {
	if cm, ok := o.(*corev1.ConfigMap); ok && !w.bundles.Right(cm) {
		w.Changed.Bundles.Notify()
	}
}

// keepBundles keeps the bundles right wherever pods use them, or will by a
// configuration. Admission writes none: anybody who reaches its port could make it.
// Those that nobody uses any more stay: a pod may be on its way in.
func (w *world) keepBundles(ctx context.Context) error {
	c := w.Compiled.Load()
	if c == nil {
		return nil
	}
	needs := bundleNeeds(c.Pods, c.Configs)
	mesh, egress := w.authority.Bundle(), w.egress.Bundle()
	var errs []error
	for _, n := range slices.SortedFunc(maps.Keys(needs), func(a, b bundleNeed) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	}) {
		// A namespace that goes lets nobody in any more.
		if err := w.bundles.Ensure(ctx, n.namespace, n.name); !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	// If a CA changed meanwhile, this is not it, and the next run stores that.
	w.MeshBundle.Store(&mesh)
	w.EgressBundle.Store(&egress)
	return nil
}

// otherBundles reports whether pods need other bundles.
func otherBundles(before, after *controllers.Compiled) bool {
	return before == nil || !maps.Equal(bundleNeeds(before.Pods, before.Configs), bundleNeeds(after.Pods, after.Configs))
}

// bundleNeed is a bundle that some pod of a namespace uses.
type bundleNeed struct{ namespace, name string }

func bundleNeeds(pods []*corev1.Pod, configs []*v1alpha1.ShardingConfig) map[bundleNeed]bool {
	needs := map[bundleNeed]bool{}
	for _, c := range configs {
		// Before its first pod, whose kubelet would have to try again.
		needs[bundleNeed{c.Namespace, inject.BundleOf(compile.Trust(c))}] = true
	}
	for _, p := range pods {
		if compile.Ended(p) {
			continue
		}
		if name := inject.BundleOf(p.Annotations[v1alpha1.TrustAnnotation]); name != "" {
			needs[bundleNeed{p.Namespace, name}] = true
		}
		if inject.TrustsEgress(p) {
			needs[bundleNeed{p.Namespace, inject.EgressBundle}] = true
		}
	}
	return needs
}
