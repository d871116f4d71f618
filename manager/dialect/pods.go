package dialect

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
)

// maxSelectors is the maximum number of selectors for the pods of one subset.
const maxSelectors = 32

// maxBreakers is the maximum number of CircuitBreakers of one TrafficPolicy.
const maxBreakers = 512

// podsOf returns selectors for the pods of a subset, by its index in spec.subsets; the default
// subset follows the last. Each pod of the subset matches exactly one selector, and no other
// pod matches any. ok is false if that takes more than maxSelectors.
//
// The pods of a subset have its labels, and lack a label of each subset before it. A selector
// cannot express "lacks any of several labels", so that each such subset multiplies the
// selectors by the number of its labels.
func podsOf(app *kruise.VirtualApp, subset int) (out []*metav1.LabelSelector, ok bool) {
	var own map[string]string
	if subset < len(app.Spec.Subsets) {
		own = app.Spec.Subsets[subset].Labels
	}
	first := conditions{has: map[string]string{}, lacks: map[string][]string{}}
	maps.Copy(first.has, own)
	alternatives := []conditions{first}
	for _, earlier := range app.Spec.Subsets[:min(subset, len(app.Spec.Subsets))] {
		var next []conditions
		for _, c := range alternatives {
			next = append(next, c.without(earlier.Labels)...)
		}
		if alternatives = next; len(alternatives) > maxSelectors {
			return nil, false
		}
	}
	for _, c := range alternatives {
		if s := c.within(app.Spec.Selector); s != nil {
			out = append(out, s)
		}
	}
	return out, true
}

// conditions are labels with the value that a pod has, and with values that it does not have.
// A key in has is not in lacks.
type conditions struct {
	has   map[string]string
	lacks map[string][]string
}

// without returns disjoint conditions that together are c without pods with all given labels.
func (c conditions) without(labels map[string]string) (out []conditions) {
	var open []string // labels that pods may have or lack under c
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		value, fixed := c.has[key]
		if fixed && value != labels[key] || slices.Contains(c.lacks[key], labels[key]) {
			return []conditions{c}
		}
		if !fixed {
			open = append(open, key)
		}
	}
	for i, key := range open {
		n := conditions{has: maps.Clone(c.has), lacks: maps.Clone(c.lacks)}
		for _, before := range open[:i] {
			n.has[before] = labels[before]
			delete(n.lacks, before)
		}
		n.lacks[key] = append(slices.Clone(n.lacks[key]), labels[key])
		out = append(out, n)
	}
	return out
}

// within returns the selector for pods that a selector matches under the conditions; nil if
// there can be none.
func (c conditions) within(s *metav1.LabelSelector) *metav1.LabelSelector {
	out := s.DeepCopy()
	if out == nil {
		return nil
	}
	for _, key := range slices.Sorted(maps.Keys(c.has)) {
		if value, given := out.MatchLabels[key]; given && value != c.has[key] {
			return nil
		}
		if out.MatchLabels == nil {
			out.MatchLabels = map[string]string{}
		}
		out.MatchLabels[key] = c.has[key]
	}
	for _, key := range slices.Sorted(maps.Keys(c.lacks)) {
		out.MatchExpressions = append(out.MatchExpressions, metav1.LabelSelectorRequirement{
			Key: key, Operator: metav1.LabelSelectorOpNotIn, Values: slices.Sorted(slices.Values(c.lacks[key])),
		})
	}
	return out
}
