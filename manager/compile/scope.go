package compile

import (
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// selectorScope is the namespaces whose objects a selector may match, by the
// labels that are stamped on objects. It is not ok where the selector asks nothing
// of those that a scope can say. What it asks of other labels does not count.
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

// asks is what one requirement leaves.
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
