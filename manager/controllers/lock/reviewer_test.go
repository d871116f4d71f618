package lock

import (
	"testing"

	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/ctrlmesh/ctrlmesh/manager/locks"
)

// The ClusterRole of the descheduler's chart allows update for all Leases, and get for its own.
func TestToLeadIsToReadAndToUpdate(t *testing.T) {
	kube := fake.NewClientset()
	kube.PrependReactor("create", "subjectaccessreviews", func(a kubetesting.Action) (bool, runtime.Object, error) {
		review := a.(kubetesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview)
		attributes := review.Spec.ResourceAttributes
		review.Status.Allowed = review.Spec.User == "system:serviceaccount:op:sa" && attributes.Group == "coordination.k8s.io" && attributes.Resource == "leases" &&
			(attributes.Verb == "update" || attributes.Verb == "get" && attributes.Name == "lock")
		return true, review, nil
	})
	r := Reviewer{Kube: kube}
	for _, test := range []struct {
		account, lock string
		update, lead  bool
	}{
		{"sa", "lock", true, true}, {"sa", "lock---op-1-normal", true, false}, {"other", "lock", false, false},
	} {
		account, lock := types.NamespacedName{Namespace: "op", Name: test.account}, types.NamespacedName{Namespace: "kube-system", Name: test.lock}
		update, err := r.MayUpdate(t.Context(), account, locks.Leases, lock)
		require.NoError(t, err)
		require.Equal(t, test.update, update, test)
		lead, err := r.MayLead(t.Context(), account, lock)
		require.NoError(t, err)
		require.Equal(t, test.lead, lead, test)
		update, err = r.MayUpdate(t.Context(), account, locks.ConfigMaps, lock)
		require.NoError(t, err)
		require.False(t, update, test)
	}
}
