package compile

import (
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// selectorScope returns the namespaces whose objects a selector may match, derived from
// its requirements on stamped labels. It ignores requirements on other labels. ok is false
// if no requirement can be expressed as a scope.
func selectorScope(selector *metav1.LabelSelector) (s sharding.Scope, ok bool) {
	if selector == nil {
		return sharding.Scope{}, false
	}
	sel, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return sharding.Scope{}, false
	}
	requirements, _ := sel.Requirements()
	s = sharding.All()
	for _, r := range requirements {
		if asked, exact := asks(r); exact {
			s, ok = s.Intersect(asked), true
		}
	}
	return s, ok
}

// asks returns the scope that one requirement allows. exact is false if no scope can
// express the requirement.
func asks(r labels.Requirement) (s sharding.Scope, exact bool) {
	switch r.Key() {
	case v1alpha1.ShardingHashLabel:
		var buckets []int
		for b := range sharding.Buckets {
			if r.Matches(labels.Set{v1alpha1.ShardingHashLabel: strconv.Itoa(b)}) {
				buckets = append(buckets, b)
			}
		}
		return sharding.InBuckets(buckets...), true
	case v1alpha1.NamespaceLabel:
		switch r.Operator() {
		case selection.In, selection.Equals, selection.DoubleEquals: // matchLabels is Equals
			return sharding.Keys(r.ValuesUnsorted()...), true
		case selection.NotIn, selection.NotEquals:
			return sharding.All().Minus(sharding.Keys(r.ValuesUnsorted()...)), true
		case selection.Exists:
			return sharding.All(), true
		case selection.DoesNotExist:
			return sharding.Scope{}, true
		}
	}
	return sharding.Scope{}, false
}
