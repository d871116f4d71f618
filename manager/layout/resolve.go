package layout

import (
	"fmt"
	"maps"
	"regexp"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// MaxNamespaces is the maximum number of namespaces that the canary or a subset can name and
// match.
const MaxNamespaces = 1024

// Resolve returns a root with the names of all namespaces that its canary or subsets match,
// beside those that it names. namespaces are those that exist, with their labels. Without
// selectors and patterns, Resolve returns root itself.
func Resolve(root *v1alpha1.RootConfig, namespaces map[string]labels.Set) (*v1alpha1.RootConfig, error) {
	out := root.DeepCopy()
	resolved := false
	if c := out.Canary; c != nil && c.InNamespaceSelector != nil {
		resolved = true
		names, err := matching([]v1alpha1.NamespaceMatch{{Names: c.InNamespaces}, {Selector: c.InNamespaceSelector}}, namespaces)
		if err != nil {
			return nil, fmt.Errorf("spec.root.canary: %w", err)
		}
		c.InNamespaces = names
	}
	for i := range out.Subsets {
		s := &out.Subsets[i]
		if !slices.ContainsFunc(s.Namespaces, func(m v1alpha1.NamespaceMatch) bool { return m.Selector != nil || m.Pattern != "" }) {
			continue
		}
		resolved = true
		names, err := matching(s.Namespaces, namespaces)
		if err != nil {
			return nil, fmt.Errorf("subset %s of spec.root.subsets: %w", s.Name, err)
		}
		s.Namespaces = append(s.Namespaces, v1alpha1.NamespaceMatch{Names: names})
	}
	if !resolved {
		return root, nil
	}
	return out, nil
}

// matching returns the namespaces that any of the entries names or matches, sorted.
func matching(entries []v1alpha1.NamespaceMatch, namespaces map[string]labels.Set) ([]string, error) {
	found := map[string]bool{}
	for _, m := range entries {
		for _, name := range m.Names {
			found[name] = true
		}
		matches, err := matcher(m)
		if err != nil {
			return nil, err
		}
		for name, of := range namespaces {
			if matches(name, of) {
				found[name] = true
			}
		}
	}
	if len(found) > MaxNamespaces {
		return nil, fmt.Errorf("%d namespaces match, and at most %d can be assigned to one shard, so the last assignment stays: match fewer, or let spec.root.auto divide them", len(found), MaxNamespaces)
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// matcher returns a function that reports whether a selector or pattern matches a namespace.
func matcher(m v1alpha1.NamespaceMatch) (func(name string, of labels.Set) bool, error) {
	switch {
	case m.Selector != nil:
		selector, err := metav1.LabelSelectorAsSelector(m.Selector)
		if err != nil {
			return nil, fmt.Errorf("invalid selector of namespaces: %w", err)
		}
		return func(_ string, of labels.Set) bool { return selector.Matches(of) }, nil
	case m.Pattern != "":
		pattern, err := regexp.Compile(m.Pattern)
		if err != nil {
			return nil, fmt.Errorf("invalid pattern %q of namespaces: %w", m.Pattern, err)
		}
		return func(name string, _ labels.Set) bool { return pattern.MatchString(name) }, nil
	}
	return func(string, labels.Set) bool { return false }, nil
}
