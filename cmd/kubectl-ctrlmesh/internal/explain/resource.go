package explain

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
)

// Resource is a resource that the apiserver serves.
type Resource struct {
	Group, Version, Name, Subresource string
	// Kind of its objects.
	Kind       string
	Namespaced bool
}

// String returns the resource as users write it, such as foos.example.com/status.
func (r Resource) String() string {
	text := schema.GroupResource{Group: r.Group, Resource: r.Name}.String()
	if r.Subresource != "" {
		text += "/" + r.Subresource
	}
	return text
}

// GroupVersionKind returns the kind of the objects of the resource itself.
func (r Resource) GroupVersionKind() schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: r.Group, Version: r.Version, Kind: r.Kind}
}

func (r Resource) apiVersion() string {
	return schema.GroupVersion{Group: r.Group, Version: r.Version}.String()
}

func (r Resource) isNamespaces() bool { return r.Group == "" && r.Name == "namespaces" }

// Find returns the resource that a user names, from the lists of the apiserver. The name is a plural, a
// singular, a kind or a short name, and may have a group or a version and a group, as with kubectl. What
// follows a slash is a subresource, or else the name of an object, which Find returns.
func Find(lists []*metav1.APIResourceList, text string) (r Resource, object string, err error) {
	base, after, _ := strings.Cut(text, "/")
	name, group, _ := strings.Cut(strings.ToLower(base), ".")
	for _, is := range []func(*metav1.APIResource) bool{
		func(r *metav1.APIResource) bool { return r.Name == name },
		func(r *metav1.APIResource) bool {
			return r.SingularName == name || strings.ToLower(r.Kind) == name && !strings.Contains(r.Name, "/")
		},
		func(r *metav1.APIResource) bool { return slices.Contains(r.ShortNames, name) },
	} {
		for _, list := range lists {
			if found := foundIn(list, group, is); found != nil {
				r := *found
				if after != "" && slices.ContainsFunc(list.APIResources, func(of metav1.APIResource) bool { return of.Name == r.Name+"/"+after }) {
					r.Subresource, after = after, ""
				}
				return r, after, nil
			}
		}
	}
	return Resource{}, "", fmt.Errorf("resource %s: %s", base, suggestion(lists, name, group))
}

// foundIn returns the resource of a list; nil if it has none.
func foundIn(list *metav1.APIResourceList, group string, is func(*metav1.APIResource) bool) *Resource {
	gv, err := schema.ParseGroupVersion(list.GroupVersion)
	if err != nil || group != "" && group != gv.Group && group != gv.Version+"."+gv.Group && group != gv.Version {
		return nil
	}
	for i := range list.APIResources {
		if one := &list.APIResources[i]; !strings.Contains(one.Name, "/") && is(one) {
			return &Resource{Group: gv.Group, Version: gv.Version, Name: one.Name, Kind: one.Kind, Namespaced: one.Namespaced}
		}
	}
	return nil
}

// suggestion says that a resource is not served, and names the one that was probably meant.
func suggestion(lists []*metav1.APIResourceList, name, group string) string {
	if group == "" {
		group = "*"
	}
	for _, message := range resources.ServedBy(lists, nil).Unknown([]v1alpha1.ResourceGroup{{APIGroups: []string{group}, Resources: []string{name}}}) {
		if _, said, _ := strings.Cut(message, ": "); strings.HasSuffix(said, "?") {
			return said
		}
	}
	return "the apiserver serves no such resource: see kubectl api-resources"
}

// Subresources returns the names of the subresources of a resource.
func Subresources(lists []*metav1.APIResourceList, of Resource) (out []string) {
	for _, list := range lists {
		for _, one := range list.APIResources {
			if name, ok := strings.CutPrefix(one.Name, of.Name+"/"); ok && list.GroupVersion == of.apiVersion() {
				out = append(out, name)
			}
		}
	}
	return out
}
