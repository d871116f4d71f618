// Package bundle writes the mesh's CAs into the namespaces whose pods trust them.
package bundle

import (
	"bytes"
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
	"github.com/ctrlmesh/ctrlmesh/internal/parallel"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
)

const (
	// patience is how long the rotation of a CA waits for namespaces whose bundle cannot be written,
	// from when it was first written anywhere: tenants may fail in turns.
	patience = 10 * time.Minute
	// atOnce bounds the bundles that are written at the same time, perBundle the time of each. A
	// webhook may take 10 s by default.
	atOnce    = 16
	perBundle = 12 * time.Second
)

// Controller writes the bundles into namespaces.
type Controller struct {
	Kube    kubernetes.Interface
	Bundles *inject.Bundles
	// Mesh and Egress return the bundles of the CAs.
	Mesh, Egress func() []byte
	State        *controllers.State

	mesh, egress rotation
}

// rotation is a CA's bundle that is being written.
type rotation struct {
	bundle []byte
	since  time.Time
}

// follow notes the bundle. It reports whether the bundle has been written for patience.
func (r *rotation) follow(bundle []byte, now time.Time) bool {
	if r.since.IsZero() || !bytes.Equal(r.bundle, bundle) {
		r.bundle, r.since = bundle, now
	}
	return now.Sub(r.since) >= patience
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
		Name: "bundles", Reconcile: r.Reconcile, Debounce: controllers.DebounceEvents, Resync: 10 * time.Minute,
		Rests: true, // a run reads the bundles of all namespaces, and any tenant may edit its own
		On:    []controllers.Source{&changed.Bundles, &changed.MeshCA, &changed.EgressCA, r.State.Compiled.When(otherNeeds)},
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
	needs := slices.SortedFunc(maps.Keys(needsOf(c.Pods, c.Configs)), func(a, b need) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
	mesh, egress, now := r.Mesh(), r.Egress(), time.Now()
	meshLong, egressLong := r.mesh.follow(mesh, now), r.egress.follow(egress, now)
	errs := r.ensure(ctx, needs)
	failing, causes := map[need]bool{}, map[string]string{}
	for i, n := range needs {
		if errs[i] != nil {
			failing[n] = true
			causes[n.namespace] = errs[i].Error()
		}
	}
	if before := r.State.MissingBundles.Load(); before == nil || !maps.Equal(*before, causes) {
		r.State.MissingBundles.Store(&causes)
	}
	// If a CA has changed meanwhile, the next run stores it.
	if spread(needs, failing, meshLong, inject.MeshBundle, inject.BothBundle) {
		r.State.MeshBundle.Store(&mesh)
	}
	if spread(needs, failing, egressLong, inject.EgressBundle) {
		r.State.EgressBundle.Store(&egress)
	}
	return errors.Join(errs...)
}

// ensure writes bundles, and returns an error, or nil, for each. Namespaces whose webhooks are slow
// delay no others for long.
func (r *Controller) ensure(ctx context.Context, needs []need) []error {
	return parallel.Each(needs, atOnce, func(n need) error {
		ctx, cancel := context.WithTimeout(ctx, perBundle)
		defer cancel()
		err := r.Bundles.Ensure(ctx, n.namespace, n.name)
		if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) { // that admits no pods
			return nil
		}
		return err
	})
}

// spread reports whether a rotation of the CA of some bundles may go on: no namespace lacks one, or
// some do after long, while another has it. A quota or a policy of a tenant then affects the tenant
// alone.
func spread(needs []need, failing map[need]bool, long bool, bundles ...string) bool {
	missing, some := false, false
	for _, n := range needs {
		if slices.Contains(bundles, n.name) {
			missing, some = missing || failing[n], some || !failing[n]
		}
	}
	return !missing || long && some
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
