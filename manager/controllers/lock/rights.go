package lock

import (
	"context"
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
)

// Reviewer asks the apiserver for rights.
type Reviewer struct{ Kube kubernetes.Interface }

// MayUpdate reports whether a ServiceAccount may update a lock.
func (r Reviewer) MayUpdate(ctx context.Context, account, lock types.NamespacedName) (bool, error) {
	review, err := r.Kube.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User:   serviceaccount.MakeUsername(account.Namespace, account.Name),
			Groups: append(serviceaccount.MakeGroupNames(account.Namespace), user.AllAuthenticated),
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Namespace: lock.Namespace, Name: lock.Name, Verb: "update", Group: "coordination.k8s.io", Resource: "leases",
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("asking for the rights of ServiceAccount %s: %w", account, err)
	}
	return review.Status.Allowed, nil
}
