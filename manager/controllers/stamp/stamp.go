// Package stamp labels the objects of method Labels: new ones by a webhook, others by a sweep.
package stamp

import (
	"context"
	"fmt"
	"slices"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
)

// Controller maintains the rules of the stamping webhook.
type Controller struct {
	Client client.Client
	// Service of the stamping webhook. CA returns the bundle that verifies it.
	Service types.NamespacedName
	CA      func() []byte
	State   *controllers.State
	Sweeper *label.Sweeper
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "stamp", Reconcile: r.Reconcile, Settle: controllers.SettleEvents, Resync: time.Minute,
		On: []controllers.Source{&r.State.Settings, r.State.Compiled.When(otherConfigs)},
	}
}

// Reconcile writes the webhook's rules and then starts the sweep, so that objects that are created
// during the sweep are already labelled.
func (r *Controller) Reconcile(ctx context.Context) error {
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	want := label.Webhooks(label.Listed(c.Configs...), label.Service{Namespace: r.Service.Namespace, Name: r.Service.Name, CA: r.CA()}, r.State.Settings.Load())
	have := &admissionv1.MutatingWebhookConfiguration{}
	err := r.Client.Get(ctx, types.NamespacedName{Name: label.Configuration}, have)
	switch {
	case apierrors.IsNotFound(err) && len(want) == 0:
		err = nil
	case apierrors.IsNotFound(err):
		// The manager may not create one: that permission would allow it to change all objects.
		err = fmt.Errorf("new objects are not labelled, apply the manifests of the mesh again: %w", err)
	case err == nil && !equality.Semantic.DeepEqual(have.Webhooks, want):
		have.Webhooks = want
		err = r.Client.Update(ctx, have)
	}
	// Even without the webhook the sweep labels what exists.
	r.Sweeper.Set(c.Configs)
	return failure.Wrap(err, "writing MutatingWebhookConfiguration %s", label.Configuration)
}

// otherConfigs reports whether a configuration has changed: the controller reads the apiserver,
// so it does not run at every step of every pod.
func otherConfigs(before, after *controllers.Compiled) bool {
	return before == nil || !slices.EqualFunc(before.Configs, after.Configs, compile.SameSpec)
}
