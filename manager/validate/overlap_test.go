package validate

import (
	"fmt"
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
		{"a>4", "a<6", true},
		{"a>4,a<6", "a notin (5)", true}, // 05
		{"a>4", "a<5", false},
		{"a>4", "a in (3)", false},
	} {
		a, err := labels.Parse(c.a)
		require.NoError(t, err)
		b, err := labels.Parse(c.b)
		require.NoError(t, err)
		example, ok := Overlap(a, b)
		require.Equal(t, c.overlap, ok, "%s with %s", c.a, c.b)
		if ok {
			require.True(t, a.Matches(example) && b.Matches(example), "%s with %s: %s", c.a, c.b, example)
		}
	}
	_, ok := Overlap(labels.Nothing(), labels.Everything())
	require.False(t, ok)
}

// If Overlap says disjoint, no labels match both; if not, its example does.
func TestOverlapIsRight(t *testing.T) {
	keys := []string{"a", "b"}
	values := []string{"0", "1", "2", "3", "x", "y", "02"}
	requirement := rapid.Custom(func(t *rapid.T) labels.Requirement {
		op := rapid.SampledFrom([]selection.Operator{
			selection.In, selection.NotIn, selection.Exists, selection.DoesNotExist, selection.GreaterThan, selection.LessThan,
		}).Draw(t, "op")
		var v []string
		switch op {
		case selection.In, selection.NotIn:
			v = rapid.SliceOfNDistinct(rapid.SampledFrom(values), 1, 4, rapid.ID[string]).Draw(t, "values")
		case selection.GreaterThan, selection.LessThan:
			v = []string{fmt.Sprint(rapid.IntRange(0, 4).Draw(t, "bound"))}
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
		example, ok := Overlap(a, b)
		_, back := Overlap(b, a)
		require.Equal(t, ok, back)
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
