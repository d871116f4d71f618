// Package webhook pushes to the agents how they route the reviews of admission.
package webhook

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/route"
)

// Controller reads the webhook configurations and the Services that they call, only while a
// ShardingConfig has spec.webhook. It does not watch them: few operators need them.
type Controller struct {
	// Client reads past the cache.
	Client client.Reader
	Push   *push.Server
	State  *controllers.State
}

// resync is how soon a new CA bundle is noticed.
const resync = 10 * time.Second

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "webhooks", Reconcile: r.Reconcile, Debounce: controllers.DebounceStatus, Resync: resync, Rests: true,
		On: []controllers.Source{&r.State.Compiled},
	}
}

// Reconcile pushes the webhooks.
func (r *Controller) Reconcile(ctx context.Context) error {
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	in := map[string]bool{}
	for _, config := range c.Configs {
		if route.Routed(config) {
			in[config.Namespace] = true
		}
	}
	services, err := r.services(ctx, in)
	if err != nil {
		return err // agents keep what they have
	}
	r.Push.SetWebhooks(route.Render(c.Result, services))
	return nil
}

// services returns the Services in some namespaces that webhook configurations call, sorted.
func (r *Controller) services(ctx context.Context, in map[string]bool) ([]route.Service, error) {
	if len(in) == 0 {
		return nil, nil
	}
	bundles, err := r.bundles(ctx)
	if err != nil {
		return nil, err
	}
	var out []route.Service
	for name, ca := range bundles {
		if !in[name.Namespace] {
			continue
		}
		service := &corev1.Service{}
		err := r.Client.Get(ctx, name, service)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading Service %s of a webhook: %w", name, err)
		}
		out = append(out, route.Service{NamespacedName: name, Selector: service.Spec.Selector, CA: ca})
	}
	slices.SortFunc(out, func(a, b route.Service) int { return cmp.Compare(a.String(), b.String()) })
	return out, nil
}

// bundles returns the CA bundles of the Services that webhook configurations call.
func (r *Controller) bundles(ctx context.Context) (map[types.NamespacedName][]byte, error) {
	var mutating admissionv1.MutatingWebhookConfigurationList
	var validating admissionv1.ValidatingWebhookConfigurationList
	if err := r.Client.List(ctx, &mutating); err != nil {
		return nil, fmt.Errorf("listing MutatingWebhookConfigurations: %w", err)
	}
	if err := r.Client.List(ctx, &validating); err != nil {
		return nil, fmt.Errorf("listing ValidatingWebhookConfigurations: %w", err)
	}
	out := map[types.NamespacedName][]byte{}
	add := func(c admissionv1.WebhookClientConfig) {
		if c.Service == nil {
			return
		}
		name := types.NamespacedName{Namespace: c.Service.Namespace, Name: c.Service.Name}
		if ca := append(bytes.TrimSpace(c.CABundle), '\n'); !bytes.Contains(out[name], ca) {
			out[name] = append(out[name], ca...)
		}
	}
	for _, one := range mutating.Items {
		for _, w := range one.Webhooks {
			add(w.ClientConfig)
		}
	}
	for _, one := range validating.Items {
		for _, w := range one.Webhooks {
			add(w.ClientConfig)
		}
	}
	return out, nil
}
