package controllers

import (
	"context"
	"fmt"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// PolicyDelay is the time until all apiservers evaluate a policy. What it replaces stays as long.
const PolicyDelay = 30 * time.Second

// PolicySince returns since when the cluster has a MutatingAdmissionPolicy of the mesh and its
// binding, which have one name; the zero time if it has none. The manager has no permission to
// write them: no policy applies to writes of policies, so it could change all objects.
func PolicySince(ctx context.Context, c client.Reader, name string) (since time.Time, err error) {
	for _, o := range []client.Object{&admissionv1.MutatingAdmissionPolicy{}, &admissionv1.MutatingAdmissionPolicyBinding{}} {
		err := c.Get(ctx, types.NamespacedName{Name: name}, o)
		if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) { // before Kubernetes 1.36 there is no such kind
			return time.Time{}, nil
		}
		if err != nil {
			return time.Time{}, fmt.Errorf("reading %T %s: %w", o, name, err)
		}
		if created := o.GetCreationTimestamp().Time; created.After(since) {
			since = created
		}
	}
	return since, nil
}

// ChangeWebhooks changes a MutatingWebhookConfiguration of the mesh, and returns the webhooks that
// it had. If it is missing, the error, a NotFound, says what does not happen without it: the manager
// may not create one, because that permission would allow it to change all objects.
func ChangeWebhooks(ctx context.Context, c client.Client, name, without string, change func(*admissionv1.MutatingWebhookConfiguration)) ([]admissionv1.MutatingWebhook, error) {
	before, err := Change(ctx, c, &admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: name}}, change)
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("%s, apply the manifests of the mesh again: %w", without, err)
	}
	return before.Webhooks, failure.Wrap(err, "writing MutatingWebhookConfiguration %s", name)
}

// Change reads an object, changes it, and writes it if it differs. It returns what it read.
func Change[T client.Object](ctx context.Context, c client.Client, object T, change func(T)) (before T, err error) {
	if err := c.Get(ctx, client.ObjectKeyFromObject(object), object); err != nil {
		return object, err
	}
	before = object.DeepCopyObject().(T)
	if change(object); equality.Semantic.DeepEqual(before, object) {
		return before, nil
	}
	return before, c.Update(ctx, object)
}
