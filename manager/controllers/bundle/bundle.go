// Package bundle writes the mesh's CAs into the namespaces whose pods trust them.
package bundle

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
)

// Controller writes the bundles into namespaces.
type Controller struct {
	Kube    kubernetes.Interface
	Bundles *inject.Bundles
	// Mesh and Egress return the bundles of the CAs.
	Mesh, Egress func() []byte
	State        *controllers.State
}

// Watch watches the mesh's ConfigMaps in all namespaces.
func (r *Controller) Watch(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, name := range []string{inject.MeshBundle, inject.BothBundle, inject.EgressBundle} {
		g.Go(func() error {
			return controllers.WatchConfigMap(ctx, r.Kube, metav1.NamespaceAll, name, r.observe, r.State.Changed.Bundles.Notify)
		})
	}
	return g.Wait()
}

func (r *Controller) observe(cm *corev1.ConfigMap) {
	if !r.Bundles.Right(cm) {
		r.State.Changed.Bundles.Notify()
	}
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	changed := &r.State.Changed
	return controllers.Spec{
		Name: "bundles", Reconcile: r.Reconcile, Settle: controllers.SettleEvents, Resync: 10 * time.Minute,
		On: []controllers.Source{&changed.Bundles, &changed.MeshCA, &changed.EgressCA, r.State.Compiled.When(otherNeeds)},
	}
}

// Reconcile writes the bundles of namespaces whose pods use them, or will by a configuration.
// Admission writes none, because any client could reach its port. Unused bundles stay, because
// a pod may be being admitted.
func (r *Controller) Reconcile(ctx context.Context) error {
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	needs := needsOf(c.Pods, c.Configs)
	mesh, egress := r.Mesh(), r.Egress()
	var errs []error
	for _, n := range slices.SortedFunc(maps.Keys(needs), func(a, b need) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	}) {
		// A namespace that is being deleted admits no pods.
		if err := r.Bundles.Ensure(ctx, n.namespace, n.name); !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	// If a CA has changed meanwhile, the next run stores it.
	r.State.MeshBundle.Store(&mesh)
	r.State.EgressBundle.Store(&egress)
	return nil
}

// otherNeeds reports whether pods need other bundles.
func otherNeeds(before, after *controllers.Compiled) bool {
	return before == nil || !maps.Equal(needsOf(before.Pods, before.Configs), needsOf(after.Pods, after.Configs))
}

// need is a bundle that some pod of a namespace uses.
type need struct{ namespace, name string }

func needsOf(pods []*corev1.Pod, configs []*v1alpha1.ShardingConfig) map[need]bool {
	needs := map[need]bool{}
	for _, c := range configs {
		// Before its first pod is created, so that its kubelet need not retry.
		needs[need{c.Namespace, inject.BundleOf(compile.Trust(c))}] = true
	}
	for _, p := range pods {
		if compile.Ended(p) {
			continue
		}
		if name := inject.BundleOf(p.Annotations[v1alpha1.TrustAnnotation]); name != "" {
			needs[need{p.Namespace, name}] = true
		}
		if inject.TrustsEgress(p) {
			needs[need{p.Namespace, inject.EgressBundle}] = true
		}
	}
	return needs
}
