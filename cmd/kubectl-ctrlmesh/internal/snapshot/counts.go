package snapshot

import (
	"context"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Resource is a resource that the apiserver serves.
type Resource struct {
	schema.GroupResource
	Version, Kind string
	Namespaced    bool
}

// Count is the number of objects of a resource.
type Count struct {
	Resource
	// By namespace, or by name if the objects are in none.
	By map[string]int64
	// Err is why the objects could not be counted.
	Err error
}

// Counts counts the objects of resources.
func Counts(resources []Resource) Part {
	return Part{"objects", func(ctx context.Context, r Reader, s *Snapshot) error {
		for _, of := range resources {
			c := Count{Resource: of, By: map[string]int64{}}
			c.Err = r.count(ctx, c)
			s.Subjects.Counts = append(s.Subjects.Counts, c)
		}
		return nil
	}}
}

func (r Reader) count(ctx context.Context, c Count) error {
	empty := func() *metav1.PartialObjectMetadataList {
		page := &metav1.PartialObjectMetadataList{}
		page.SetGroupVersionKind(schema.GroupVersionKind{Group: c.Group, Version: c.Version, Kind: c.Kind + "List"})
		return page
	}
	return pages(ctx, r, empty, func(page *metav1.PartialObjectMetadataList) error {
		for i := range page.Items {
			if c.Namespaced {
				c.By[page.Items[i].Namespace]++
			} else {
				c.By[page.Items[i].Name]++
			}
		}
		return nil
	})
}

// ManagerLists asks the apiserver which resources the manager may list.
func ManagerLists(resources []Resource) Part {
	return Part{"permissions of the manager", func(ctx context.Context, r Reader, s *Snapshot) error {
		account := "system:serviceaccount:" + r.Namespace + ":" + Manager
		for _, of := range resources {
			review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User: account, Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + r.Namespace, "system:authenticated"},
				ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "list", Group: of.Group, Resource: of.Resource},
			}}
			if err := r.Client.Create(ctx, review); err != nil {
				return err
			}
			if !review.Status.Allowed {
				s.Subjects.Unlisted = append(s.Subjects.Unlisted, of.GroupResource)
			}
		}
		return nil
	}}
}
