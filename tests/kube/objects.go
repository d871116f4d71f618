package kube

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
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

// Empty returns an error unless a list, read with err, is empty. Use it in [Until].
func Empty(list client.ObjectList, err error) error {
	if err == nil && meta.LenList(list) > 0 {
		err = fmt.Errorf("%d are left", meta.LenList(list))
	}
	return err
}
