package validate

import (
	"fmt"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/util/sets"
)

// Overlap tells whether some labels match both selectors, and gives such labels.
//
// Requirements on different keys do not touch each other, so both hold together
// if on each key some value, or the key's absence, satisfies all that is asked
// of it.
func Overlap(a, b labels.Selector) (example labels.Set, overlap bool) {
	byKey := map[string][]labels.Requirement{}
	for _, s := range []labels.Selector{a, b} {
		requirements, selectable := s.Requirements()
		if !selectable {
			return nil, false // it selects nothing
		}
		for _, r := range requirements {
			byKey[r.Key()] = append(byKey[r.Key()], r)
		}
	}
	example = labels.Set{}
	for key, requirements := range byKey {
		value, present, ok := satisfy(requirements)
		if !ok {
			return nil, false
		}
		if present {
			example[key] = value
		}
	}
	return example, true
}

// SharedKeys are the label keys that both selectors speak of.
func SharedKeys(a, b labels.Selector) []string {
	keys := func(s labels.Selector) sets.Set[string] {
		out := sets.New[string]()
		requirements, _ := s.Requirements()
		for _, r := range requirements {
			out.Insert(r.Key())
		}
		return out
	}
	return sets.List(keys(a).Intersection(keys(b)))
}

// satisfy looks for a value of one key that meets all requirements on it, or
// finds that the key must be, or may well be, absent.
func satisfy(requirements []labels.Requirement) (value string, present, ok bool) {
	try := func(set labels.Set) bool {
		return !slices.ContainsFunc(requirements, func(r labels.Requirement) bool { return !r.Matches(set) })
	}
	key := requirements[0].Key()
	for _, v := range candidates(requirements) {
		if try(labels.Set{key: v}) {
			return v, true, true
		}
	}
	return "", false, try(labels.Set{})
}

// candidates are values of which one satisfies the requirements if any does.
// If values are listed it is among those. If numbers are bounded, one next to a
// bound or to an excluded number will do. Else any value that is not excluded
// will: one more than are named.
func candidates(requirements []labels.Requirement) []string {
	named := sets.New[string]()
	bounds := sets.New[int64]()
	for _, r := range requirements {
		named = named.Union(sets.New(r.ValuesUnsorted()...))
		if op := r.Operator(); op == selection.GreaterThan || op == selection.LessThan {
			for _, v := range r.ValuesUnsorted() {
				if n, err := strconv.ParseInt(v, 10, 64); err == nil {
					bounds.Insert(n)
				}
			}
		}
	}
	out := sets.List(named)
	for b := range bounds {
		for d := int64(1); d <= int64(named.Len())+1; d++ {
			for _, n := range []int64{b + d, b - d} {
				digits := len(strconv.FormatInt(n, 10))
				for pad := range named.Len() + 1 { // 5 and 05 are different values
					out = append(out, fmt.Sprintf("%0*d", digits+pad, n))
				}
			}
		}
	}
	for i := range named.Len() + 1 {
		out = append(out, fmt.Sprintf("example-%d", i))
	}
	return out
}
