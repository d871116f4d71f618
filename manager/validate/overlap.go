package validate

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/util/sets"
)

// conditions are the requirements of selectors by label key, with the operators of
// metav1.LabelSelector: In, NotIn, Exists and DoesNotExist. The cost of matching labels does not
// depend on the number of values; the cost of merging selectors is linear in it.
type conditions map[string]*condition

// condition is the requirement on one key.
type condition struct {
	in      sets.Set[string] // nil if any value will do
	notIn   sets.Set[string]
	present bool // the key must exist
	absent  bool // the key must not exist
}

// conditionsOf returns the joint requirements of selectors. It is not ok if one of them selects
// nothing.
func conditionsOf(selectors ...labels.Selector) (out conditions, ok bool) {
	out = conditions{}
	for _, s := range selectors {
		requirements, selectable := s.Requirements()
		if !selectable {
			return nil, false
		}
		for _, r := range requirements {
			out.require(r)
		}
	}
	return out, true
}

func (c conditions) require(r labels.Requirement) {
	on := c[r.Key()]
	if on == nil {
		on = &condition{notIn: sets.New[string]()}
		c[r.Key()] = on
	}
	switch r.Operator() {
	case selection.In, selection.Equals, selection.DoubleEquals:
		values := sets.New(r.ValuesUnsorted()...)
		if on.in != nil {
			values = values.Intersection(on.in)
		}
		on.in = values
	case selection.NotIn, selection.NotEquals:
		on.notIn.Insert(r.ValuesUnsorted()...)
	case selection.Exists:
		on.present = true
	case selection.DoesNotExist:
		on.absent = true
	}
}

// merge adds the requirements of others.
func (c conditions) merge(others conditions) {
	for key, o := range others {
		on := c[key]
		if on == nil {
			c[key] = o
			continue
		}
		both := &condition{in: on.in, notIn: on.notIn.Union(o.notIn), present: on.present || o.present, absent: on.absent || o.absent}
		switch {
		case on.in == nil:
			both.in = o.in
		case o.in != nil:
			both.in = on.in.Intersection(o.in)
		}
		c[key] = both
	}
}

// matches reports whether labels fulfil all conditions.
func (c conditions) matches(set map[string]string) bool {
	for key, on := range c {
		value, has := set[key]
		if has && !on.allows(value) || !has && !on.allowsAbsence() {
			return false
		}
	}
	return true
}

func (c *condition) allows(value string) bool {
	return !c.absent && (c.in == nil || c.in.Has(value)) && !c.notIn.Has(value)
}

func (c *condition) allowsAbsence() bool { return !c.present && c.in == nil }

// satisfy returns an allowed value, or reports that the key must be absent.
func (c *condition) satisfy() (value string, present, ok bool) {
	switch {
	case c.absent:
		return "", false, c.allowsAbsence()
	case c.in != nil:
		for _, v := range slices.Sorted(maps.Keys(c.in)) {
			if c.allows(v) {
				return v, true, true
			}
		}
		return "", false, false
	}
	for i := 0; ; i++ { // ends: one more value than are excluded is tried at most
		if v := example(i); c.allows(v) {
			return v, true, true
		}
	}
}

// example returns a value that selectors are unlikely to contain.
func example(i int) string { return fmt.Sprintf("example-%d", i) }

// satisfy returns labels that fulfil all conditions. Conditions on different keys are
// independent.
func (c conditions) satisfy() (example labels.Set, ok bool) {
	example = labels.Set{}
	for key, on := range c {
		value, present, ok := on.satisfy()
		if !ok {
			return nil, false
		}
		if present {
			example[key] = value
		}
	}
	return example, true
}

// sharedKeys returns the label keys with conditions of both, sorted.
func sharedKeys(a, b conditions) []string {
	return sets.List(sets.KeySet(a).Intersection(sets.KeySet(b)))
}
