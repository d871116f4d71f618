package snapshot

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
)

// Groups are those of the mesh's own kinds and of its dialects.
var Groups = []string{v1alpha1.GroupName, kridge.GroupName, kruise.GroupName}

// Kinds returns the kinds of the mesh and its dialects that the apiserver serves, in the preferred
// versions.
func (r Reader) Kinds() (out []schema.GroupVersionKind, err error) {
	served, _, err := r.Served()
	if err != nil {
		return nil, err
	}
	for _, l := range served {
		version, err := schema.ParseGroupVersion(l.GroupVersion)
		if err != nil || !slices.Contains(Groups, version.Group) {
			continue
		}
		for _, resource := range l.APIResources {
			kind := version.WithKind(resource.Kind)
			same := func(k schema.GroupVersionKind) bool { return k.GroupKind() == kind.GroupKind() }
			if slices.Contains(resource.Verbs, "list") && !slices.ContainsFunc(out, same) {
				out = append(out, kind)
			}
		}
	}
	return out, nil
}

// Applied reads the objects of the mesh's kinds and of its dialects, as they are stored.
var Applied = Part{"objects of the mesh's kinds", func(ctx context.Context, r Reader, s *Snapshot) error {
	kinds, err := r.Kinds()
	if err != nil {
		return err
	}
	for _, k := range kinds {
		err := r.EachPage(ctx, k, func(page []unstructured.Unstructured) error {
			for i := range page {
				s.Subjects.Applied = append(s.Subjects.Applied, &page[i])
			}
			return nil
		})
		if err != nil && !Absent(err) {
			return fmt.Errorf("%s: %w", k.GroupKind(), err)
		}
	}
	return nil
}}
