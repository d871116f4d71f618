package validate

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"pgregory.net/rapid"
)

func TestOverlap(t *testing.T) {
	for _, c := range []struct {
		a, b    string
		overlap bool
	}{
		{"shard=0", "shard=1", false},
		{"shard=0", "shard=0", true},
		{"shard in (0,1)", "shard in (1,2)", true},
		{"shard in (0,1)", "shard notin (0,1)", false},
		{"shard", "!shard", false},
		{"shard", "shard notin (a,b)", true},
		{"!shard", "shard notin (a)", true},
		{"a=1", "b=1", true},
		{"a=1,b=1", "a=1,b=2", false},
		{"a in (1,2),a in (2,3)", "a notin (1)", true},
		{"a in (1,2),a in (2,3)", "a notin (2)", false},
	} {
		a, err := labels.Parse(c.a)
		require.NoError(t, err)
		b, err := labels.Parse(c.b)
		require.NoError(t, err)
		example, ok := overlap(a, b)
		require.Equal(t, c.overlap, ok, "%s with %s", c.a, c.b)
		if ok {
			require.True(t, a.Matches(example) && b.Matches(example), "%s with %s: %s", c.a, c.b, example)
		}
	}
	_, ok := overlap(labels.Nothing(), labels.Everything())
	require.False(t, ok)
}

// overlap returns labels that match both selectors.
func overlap(a, b labels.Selector) (labels.Set, bool) {
	both, ok := conditionsOf(a, b)
	if !ok {
		return nil, false
	}
	return both.satisfy()
}

// If selectors are disjoint, no labels match both; if not, the example does. Merged
// conditions are those of both selectors.
func TestOverlapIsRight(t *testing.T) {
	keys := []string{"a", "b"}
	values := []string{"0", "1", "2", "3", "x", "y", "02"}
	requirement := rapid.Custom(func(t *rapid.T) labels.Requirement {
		op := rapid.SampledFrom([]selection.Operator{selection.In, selection.NotIn, selection.Exists, selection.DoesNotExist}).Draw(t, "op")
		var v []string
		if op == selection.In || op == selection.NotIn {
			v = rapid.SliceOfNDistinct(rapid.SampledFrom(values), 1, 4, rapid.ID[string]).Draw(t, "values")
		}
		r, err := labels.NewRequirement(rapid.SampledFrom(keys).Draw(t, "key"), op, v)
		require.NoError(t, err)
		return *r
	})
	selector := rapid.Custom(func(t *rapid.T) labels.Selector {
		return labels.NewSelector().Add(rapid.SliceOfN(requirement, 1, 4).Draw(t, "requirements")...)
	})
	set := rapid.Custom(func(t *rapid.T) labels.Set {
		s := labels.Set{}
		for _, k := range keys {
			if v := rapid.SampledFrom(append([]string{"absent", "z", "4", "5", "003"}, values...)).Draw(t, k); v != "absent" {
				s[k] = v
			}
		}
		return s
	})
	rapid.Check(t, func(t *rapid.T) {
		a, b := selector.Draw(t, "a"), selector.Draw(t, "b")
		example, ok := overlap(a, b)
		_, back := overlap(b, a)
		require.Equal(t, ok, back)
		merged, ok1 := conditionsOf(a)
		other, ok2 := conditionsOf(b)
		require.True(t, ok1 && ok2)
		merged.merge(other)
		for range 5 {
			s := set.Draw(t, "any labels")
			require.Equal(t, a.Matches(s) && b.Matches(s), merged.matches(s), "%v", s)
		}
		if ok {
			require.True(t, a.Matches(example) && b.Matches(example), "%v", example)
			return
		}
		for range 20 {
			s := set.Draw(t, "labels")
			require.False(t, a.Matches(s) && b.Matches(s), "%v", s)
		}
	})
}
