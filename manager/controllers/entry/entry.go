// Package entry keeps what puts the pods of VirtualApps on the mesh: the labels of namespaces that
// a policy reads, or a webhook with an entry for each VirtualApp.
package entry

import (
	"context"
	"maps"
	"slices"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// resync is how soon the edit of an entry is reverted.
const resync = 10 * time.Second

// Controller keeps the entries. A VirtualApp that is being deleted keeps its own: its shards act
// until it is gone.
type Controller struct {
	Client client.Client
	// Service of the webhook. CA returns the bundle that verifies it.
	Service    types.NamespacedName
	CA         func() []byte
	State      *controllers.State
	Namespaces *label.Namespaces
	Now        func() time.Time
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "entries", Reconcile: r.Reconcile, Debounce: controllers.DebounceEvents, Resync: resync,
		On: []controllers.Source{r.State.Listed.When(otherConfigs)},
	}
}

// otherConfigs reports whether a configuration has changed.
func otherConfigs(before, after *controllers.Listed) bool {
	return before == nil || !slices.EqualFunc(before.Configs, after.Configs, compile.SameSpec)
}

// Reconcile puts new pods on the mesh, by a policy if the administrator has installed it, and then
// publishes since when.
func (r *Controller) Reconcile(ctx context.Context) error {
	l := r.State.Listed.Load()
	if l == nil {
		return nil
	}
	since, err := controllers.PolicySince(ctx, r.Client, inject.EntriesConfiguration)
	switch {
	case err == nil && since.IsZero():
		err = r.byWebhook(ctx, l.Configs)
	case err == nil:
		err = r.byPolicy(ctx, l.Configs, r.Now().Sub(since) >= controllers.PolicyDelay)
	}
	if err != nil {
		r.State.Entries.Store(nil)
	}
	return err
}

func (r *Controller) byWebhook(ctx context.Context, configs []*v1alpha1.ShardingConfig) error {
	want, full := inject.Entries(configs, r.Service, r.CA())
	before, err := r.write(ctx, func(c *admissionv1.MutatingWebhookConfiguration) { c.Webhooks = want })
	if apierrors.IsNotFound(err) && len(want) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	next := map[types.UID]decide.Entry{}
	for _, c := range full {
		next[c.UID] = decide.Entry{Full: true}
	}
	for _, c := range configs {
		if is := named(want, inject.EntryOf(c)); is != nil {
			next[c.UID] = r.entry(c, equality.Semantic.DeepEqual(is, named(before, is.Name)))
		}
	}
	r.publish(next)
	return nil
}

// byPolicy labels the namespaces in which the policy reads VirtualApps. Entries of the webhook
// stay until all apiservers evaluate it.
func (r *Controller) byPolicy(ctx context.Context, configs []*v1alpha1.ShardingConfig, evaluated bool) error {
	apps := inject.Apps(configs, r.Service.Namespace)
	labelled, err := r.Namespaces.Set(ctx, v1alpha1.VirtualAppsLabel, func(namespace string) string {
		if slices.ContainsFunc(apps, func(c *v1alpha1.ShardingConfig) bool { return c.Namespace == namespace }) {
			return "true"
		}
		return ""
	})
	if err != nil {
		return err
	}
	before, err := r.write(ctx, func(c *admissionv1.MutatingWebhookConfiguration) {
		if evaluated {
			c.Webhooks = nil
		}
	})
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	next := map[types.UID]decide.Entry{}
	for _, c := range apps {
		next[c.UID] = r.entry(c, !slices.Contains(labelled, c.Namespace) || named(before, inject.EntryOf(c)) != nil)
	}
	r.publish(next)
	return nil
}

// write changes the entries. It returns those that were there.
func (r *Controller) write(ctx context.Context, change func(*admissionv1.MutatingWebhookConfiguration)) ([]admissionv1.MutatingWebhook, error) {
	return controllers.ChangeWebhooks(ctx, r.Client, inject.EntriesConfiguration, "pods of VirtualApps are not put on the mesh", change)
}

func named(list []admissionv1.MutatingWebhook, name string) *admissionv1.MutatingWebhook {
	return collect.Find(list, func(w admissionv1.MutatingWebhook) bool { return w.Name == name })
}

// entry returns the entry of a VirtualApp: the known one if it stays, else a new one.
func (r *Controller) entry(app *v1alpha1.ShardingConfig, stays bool) decide.Entry {
	if known := r.State.Entry(app); stays && !known.Since.IsZero() {
		return known
	}
	return decide.Entry{Since: r.Now()}
}

// publish stores since when pods of VirtualApps are put on the mesh.
func (r *Controller) publish(next map[types.UID]decide.Entry) {
	if known := r.State.Entries.Load(); known == nil || !maps.Equal(*known, next) {
		r.State.Entries.Store(&next)
	}
}
