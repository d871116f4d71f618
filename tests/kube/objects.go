package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// CreateAll creates objects in order. It stops at the first error.
func (c *Cluster) CreateAll(ctx context.Context, objects ...client.Object) error {
	for _, obj := range objects {
		if err := c.Create(ctx, obj); err != nil {
			return fmt.Errorf("making %T %s/%s: %w", obj, obj.GetNamespace(), obj.GetName(), err)
		}
	}
	return nil
}

// AllowRollback returns what permits the manager to change the templates of StatefulSets in a
// namespace that have meshv1alpha1.AllowRollbackAnnotation.
func AllowRollback(namespace string) *rbacv1.RoleBinding {
	const role = "ctrlmesh-rollback"
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: role},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: SystemNamespace, Name: ManagerName}},
	}
}

// OwnedBy returns the owner references of a cluster-wide object that is deleted with a
// namespace.
func (c *Cluster) OwnedBy(ctx context.Context, namespace string) ([]metav1.OwnerReference, error) {
	var ns corev1.Namespace
	if err := c.Get(ctx, client.ObjectKey{Name: namespace}, &ns); err != nil {
		return nil, fmt.Errorf("reading namespace %s: %w", namespace, err)
	}
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Namespace", Name: ns.Name, UID: ns.UID}}, nil
}

// Empty returns an error unless a list, read with err, is empty. Use it in [Until].
func Empty(list client.ObjectList, err error) error {
	if err == nil && meta.LenList(list) > 0 {
		err = fmt.Errorf("%d are left", meta.LenList(list))
	}
	return err
}
