package controllers

import (
	"context"
	"fmt"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// PolicySettles is the time until all apiservers evaluate a policy. What it replaces stays as long.
const PolicySettles = 30 * time.Second

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
