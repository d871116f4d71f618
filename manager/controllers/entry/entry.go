// Package entry keeps the webhook that puts the pods of VirtualApps on the mesh, with an entry
// for each VirtualApp.
package entry

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// resync is how soon the edit of an entry is reverted.
const resync = 10 * time.Second

// Controller keeps the entries. A VirtualApp that is being deleted keeps its own: its shards act
// until it is gone.
type Controller struct {
	Client client.Client
	// Service of the webhook. CA returns the bundle that verifies it.
	Service types.NamespacedName
	CA      func() []byte
	State   *controllers.State
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "entries", Reconcile: r.Reconcile, Settle: controllers.SettleEvents, Resync: resync,
		On: []controllers.Source{r.State.Listed.When(otherConfigs)},
	}
}

// otherConfigs reports whether a configuration has changed.
func otherConfigs(before, after *controllers.Listed) bool {
	return before == nil || !slices.EqualFunc(before.Configs, after.Configs, compile.SameSpec)
}

// Reconcile writes the entries, and then publishes which are in place.
func (r *Controller) Reconcile(ctx context.Context) error {
	l := r.State.Listed.Load()
	if l == nil {
		return nil
	}
	want, full := inject.Entries(l.Configs, r.Service, r.CA())
	have := &admissionv1.MutatingWebhookConfiguration{}
	err := r.Client.Get(ctx, types.NamespacedName{Name: inject.EntriesConfiguration}, have)
	there := slices.Clone(have.Webhooks)
	switch {
	case apierrors.IsNotFound(err) && len(want) == 0:
		return nil
	case apierrors.IsNotFound(err):
		// The manager may not create one: that permission would allow it to change all objects.
		err = fmt.Errorf("pods of VirtualApps are not put on the mesh, apply the manifests of the mesh again: %w", err)
	case err == nil && !equality.Semantic.DeepEqual(there, want):
		have.Webhooks = want
		err = r.Client.Update(ctx, have)
	}
	if err == nil {
		r.publish(l.Configs, full, there, want)
	} else {
		r.State.Entries.Store(nil)
	}
	return failure.Wrap(err, "writing MutatingWebhookConfiguration %s", inject.EntriesConfiguration)
}

// publish stores since when the entries of VirtualApps are in place, and that there is no room
// for those of full. before are those that were there before now.
func (r *Controller) publish(configs, full []*v1alpha1.ShardingConfig, before, now []admissionv1.MutatingWebhook) {
	known := r.State.Entries.Load()
	named := func(list []admissionv1.MutatingWebhook, name string) *admissionv1.MutatingWebhook {
		if i := slices.IndexFunc(list, func(w admissionv1.MutatingWebhook) bool { return w.Name == name }); i >= 0 {
			return &list[i]
		}
		return nil
	}
	next := map[types.UID]decide.Entry{}
	for _, c := range full {
		next[c.UID] = decide.Entry{Full: true}
	}
	for _, c := range configs {
		is := named(now, inject.EntryOf(c))
		if is == nil {
			continue
		}
		next[c.UID] = decide.Entry{Since: time.Now()}
		if known != nil && !(*known)[c.UID].Since.IsZero() && equality.Semantic.DeepEqual(is, named(before, is.Name)) {
			next[c.UID] = (*known)[c.UID]
		}
	}
	if known == nil || !maps.Equal(*known, next) {
		r.State.Entries.Store(&next)
	}
}
