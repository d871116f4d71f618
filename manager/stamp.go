package manager

import (
	"context"
	"fmt"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/manager/label"
)

// keepStamp keeps the rules of the stamping webhook, and only then tells the
// sweep: what is created while it walks is already stamped.
func (w *world) keepStamp(ctx context.Context) error {
	c := w.Compiled.Load()
	if c == nil {
		return nil
	}
	want := label.Webhooks(label.Listed(c.Configs...), label.Service{Namespace: w.Namespace, Name: w.WebhookService, CA: w.serving.Bundle()}, w.Settings.Load())
	have := &admissionv1.MutatingWebhookConfiguration{}
	err := w.live.Get(ctx, types.NamespacedName{Name: label.Configuration}, have)
	switch {
	case apierrors.IsNotFound(err) && len(want) == 0:
		err = nil
	case apierrors.IsNotFound(err):
		// The manager may not create any: that would be the right to change everything.
		err = fmt.Errorf("new objects are not labelled at their creation, apply the manifests of the mesh again: %w", err)
	case err == nil && !equality.Semantic.DeepEqual(have.Webhooks, want):
		have.Webhooks = want
		err = w.live.Update(ctx, have)
	}
	// Even without the webhook the sweep labels what exists.
	w.sweeper.Set(c.Configs)
	if err != nil {
		return fmt.Errorf("MutatingWebhookConfiguration %s: %w", label.Configuration, err)
	}
	return nil
}
