package compile

import (
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"pgregory.net/rapid"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
)

var somePlaces = []string{"a", "b", "default", "tenant-0000", "tenant-0001", "tenant-0002", "5", "17"}

// A shard that was written by hand owns the namespaces whose objects its selector
// matches.
func TestScopeAgreesWithTheSelector(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		sel, mesh := &metav1.LabelSelector{}, &metav1.LabelSelector{}
		for range rapid.IntRange(1, 4).Draw(rt, "requirements") {
			r := requirement(rt)
			sel.MatchExpressions = append(sel.MatchExpressions, r)
			if r.Key != "app" {
				mesh.MatchExpressions = append(mesh.MatchExpressions, r)
			}
		}
		sel.MatchLabels = rapid.MapOfN(rapid.SampledFrom([]string{v1alpha1.NamespaceLabel, v1alpha1.ShardingHashLabel}), rapid.SampledFrom(somePlaces), 0, 1).Draw(rt, "matchLabels")
		mesh.MatchLabels = sel.MatchLabels
		selector, err := metav1.LabelSelectorAsSelector(sel)
		require.NoError(rt, err)
		s, ok := selectorScope(selector)
		require.Equal(rt, len(mesh.MatchExpressions)+len(mesh.MatchLabels) > 0, ok)
		matcher, err := metav1.LabelSelectorAsSelector(mesh)
		require.NoError(rt, err)
		for _, ns := range append(slices.Clone(somePlaces), rapid.StringMatching(`[a-z]{1,8}`).Draw(rt, "namespace")) {
			require.Equal(rt, matcher.Matches(labels.Set(label.Of(ns))), !ok || s.Owns(ns), "%s in %s", ns, matcher)
		}
	})
}

func requirement(rt *rapid.T) metav1.LabelSelectorRequirement {
	values := somePlaces
	key := rapid.SampledFrom([]string{v1alpha1.NamespaceLabel, v1alpha1.ShardingHashLabel, "app"}).Draw(rt, "key")
	if key == v1alpha1.ShardingHashLabel {
		values = nil
		for b := range sharding.Buckets {
			values = append(values, strconv.Itoa(b))
		}
	}
	op := rapid.SampledFrom([]metav1.LabelSelectorOperator{
		metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist,
	}).Draw(rt, "operator")
	if op == metav1.LabelSelectorOpExists || op == metav1.LabelSelectorOpDoesNotExist {
		values = nil
	} else {
		values = rapid.SliceOfNDistinct(rapid.SampledFrom(values), 1, 5, rapid.ID).Draw(rt, "values")
	}
	return metav1.LabelSelectorRequirement{Key: key, Operator: op, Values: values}
}

// What says nothing of namespaces divides nothing by them.
func TestNoScopeWithoutNamespaces(t *testing.T) {
	for _, sel := range []*metav1.LabelSelector{
		nil, {}, {MatchLabels: map[string]string{"app": "foo", v1alpha1.ControlLabel: "true"}},
	} {
		selector, err := metav1.LabelSelectorAsSelector(sel)
		require.NoError(t, err)
		_, ok := selectorScope(selector)
		require.False(t, ok, "%v", sel)
	}
}

// By labels a shard sees what is its own, of the namespaces that exist.
func TestLabelSelectorAgreesWithTheScope(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		scope := rapid.SampledFrom([]sharding.Scope{
			{}, sharding.All(), sharding.InBuckets(1, 5, 17), sharding.Keys("a", "tenant-0001"),
			sharding.Of(sharding.Range{First: 0, Last: rapid.Uint64().Draw(rt, "last")}),
			sharding.All().Minus(sharding.Keys("b")).Minus(sharding.InBuckets(3)),
		}).Draw(rt, "scope")
		sel, err := labels.Parse(scope.LabelSelector(somePlaces))
		require.NoError(rt, err)
		for _, ns := range somePlaces {
			require.Equal(rt, scope.Owns(ns), sel.Matches(labels.Set(label.Of(ns))), "%s by %s", ns, sel)
		}
	})
}
