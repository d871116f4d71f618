// Package resources knows which resources the apiserver serves, and finds those that a
// configuration names and that do not exist.
//
// A misspelt name divides nothing: every shard would act on all objects of the resource that
// its author meant.
package resources

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/set"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
)

// Served is what the apiserver serves.
type Served struct {
	// Kinds are the resources that have objects, by resource and group.
	Kinds map[schema.GroupResource]metav1.APIResource
	// Failing are the groups whose resources could not be listed.
	Failing set.Set[string]
}

// ServedBy returns what lists contain, without subresources.
func ServedBy(lists []*metav1.APIResourceList, failing set.Set[string]) *Served {
	s := &Served{map[schema.GroupResource]metav1.APIResource{}, failing}
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			continue
		}
		for _, r := range list.APIResources {
			if !strings.Contains(r.Name, "/") {
				s.Kinds[schema.GroupResource{Group: gv.Group, Resource: r.Name}] = r
			}
		}
	}
	return s
}

// same reports whether the same resources are served. other may be nil.
func (s *Served) same(other *Served) bool {
	exists := func(_, _ metav1.APIResource) bool { return true }
	return other != nil && maps.EqualFunc(s.Kinds, other.Kinds, exists) && s.Failing.Equal(other.Failing)
}

// Unknown returns a message for each resource that groups name and that is not served, with
// the name that was probably meant. Resources of a failing group are unknown too.
func (s *Served) Unknown(groups []v1alpha1.ResourceGroup) (messages []string) {
	for _, name := range label.Resources(groups) {
		if s.serves(name) {
			continue
		}
		messages = append(messages, s.describe(name))
	}
	slices.Sort(messages)
	return slices.Compact(messages)
}

// Undetermined reports whether a group that fails may serve one of the named resources.
func (s *Served) Undetermined(groups []v1alpha1.ResourceGroup) bool {
	return slices.ContainsFunc(label.Resources(groups), func(name schema.GroupResource) bool {
		return !s.serves(name) && (s.Failing.Has(name.Group) || name.Group == "*" && s.Failing.Len() > 0)
	})
}

func (s *Served) serves(name schema.GroupResource) bool {
	if name.Group == "*" && name.Resource == "*" {
		return true
	}
	name.Resource, _, _ = strings.Cut(name.Resource, "/")
	if _, ok := s.Kinds[name]; ok {
		return true
	}
	return collect.Any(s.Kinds, func(gr schema.GroupResource, _ metav1.APIResource) bool {
		return matches(name.Group, gr.Group) && matches(name.Resource, gr.Resource)
	})
}

func matches(name, served string) bool { return name == "*" || name == served }

func (s *Served) describe(name schema.GroupResource) string {
	switch {
	case s.Failing.Has(name.Group):
		return fmt.Sprintf("%s: the apiserver cannot list the resources of group %q at the moment", name, name.Group)
	case name.Resource == "*":
		return fmt.Sprintf("group %q: the apiserver serves no such group%s", name.Group, s.suggestGroup(name.Group))
	}
	return fmt.Sprintf("%s: the apiserver serves no such resource%s", name, s.suggest(name))
}

// suggest proposes the resource that was probably meant: by its kind, singular or short name,
// else by the nearest name.
func (s *Served) suggest(name schema.GroupResource) string {
	best, distance := schema.GroupResource{}, maxDistance+1
	for gr, r := range s.Kinds {
		d := min(edits(name.Resource, gr.Resource), edits(strings.ToLower(name.Resource), strings.ToLower(r.Kind)))
		if slices.Contains(append(r.ShortNames, r.SingularName), strings.ToLower(name.Resource)) || strings.EqualFold(name.Resource, r.Kind) || name.Resource == gr.Resource {
			d = 0
		}
		if !matches(name.Group, gr.Group) {
			d++ // a near name in this group is likelier than an equal one in another
		}
		if d < distance || d == distance && gr.String() < best.String() {
			best, distance = gr, d
		}
	}
	if distance > maxDistance {
		return ""
	}
	if matches(name.Group, best.Group) {
		return fmt.Sprintf("; did you mean %s?", best.Resource)
	}
	return fmt.Sprintf("; did you mean %s of group %q?", best.Resource, best.Group)
}

func (s *Served) suggestGroup(name string) string {
	best, distance := "", maxDistance+1
	for gr := range s.Kinds {
		if d := edits(name, gr.Group); d < distance || d == distance && gr.Group < best {
			best, distance = gr.Group, d
		}
	}
	if distance > maxDistance {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", best)
}

// maxDistance is how many letters of a name may be wrong for another one to be proposed.
const maxDistance = 2

// edits returns how many letters must be added, removed or replaced to make b of a.
func edits(a, b string) int {
	if d := len(a) - len(b); d > maxDistance || -d > maxDistance {
		return maxDistance + 1
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(row[j]+1, row[j+1]+1, replace)
		}
	}
	return row[len(b)]
}
