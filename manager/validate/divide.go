package validate

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// divided finds another shard of the same operator, by its lock, that would own an object of
// this one, and names the labels of such an object. It ends with the context.
func divided(ctx context.Context, c *v1alpha1.ShardingConfig, others []v1alpha1.ShardingConfig) (string, error) {
	if compile.Shadows(c) {
		return "", nil
	}
	locks := compile.OperatorLocks(c, c.Status.Locks)
	mine := newOwnership(label.Limits(c))
	for _, o := range others {
		theirs := compile.OperatorLocks(&o, o.Status.Locks)
		shared := slices.IndexFunc(locks, func(l types.NamespacedName) bool { return slices.Contains(theirs, l) })
		if shared < 0 || compile.Derived(&o) || compile.Shadows(&o) {
			continue
		}
		object, err := mine.object(ctx, newOwnership(label.Limits(&o)))
		if err != nil {
			return "", err
		}
		if object != "" {
			return fmt.Sprintf("spec.limits: %s would be owned by this and by %s, which shares the lock %s: make the selectors exclude each other, or take the object from the other one first",
				object, origin.Describe(&o), locks[shared].Name), nil
		}
	}
	return "", nil
}

// Overlap returns an object that two configurations would both own, by its resource and labels; empty
// if there is none. Shadows own nothing. Its cost is linear in the values of the selectors. It ends with
// the context.
func Overlap(ctx context.Context, a, b *v1alpha1.ShardingConfig) (object string, err error) {
	if compile.Shadows(a) || compile.Shadows(b) {
		return "", nil
	}
	return newOwnership(label.Limits(a)).object(ctx, newOwnership(label.Limits(b)))
}

// ownership is the objects that limits select, by resource.
type ownership struct {
	limits []v1alpha1.ObjectLimiter
	naming map[schema.GroupResource][]int // the indexes of the limits that name a resource, sorted
	// owned are the conditions of limits that apply together, by their indexes; nil if a
	// selector is invalid.
	owned map[string]conditions
}

func newOwnership(limits []v1alpha1.ObjectLimiter) *ownership {
	o := &ownership{limits: limits, naming: map[schema.GroupResource][]int{}, owned: map[string]conditions{}}
	for i, l := range limits {
		for _, r := range label.Resources(l.RelateResources) {
			if naming := o.naming[r]; !slices.Contains(naming, i) {
				o.naming[r] = append(naming, i)
			}
		}
	}
	return o
}

// of returns the limits that apply to a resource: all that name it apply together.
func (o *ownership) of(r schema.GroupResource) (key string, limits []int) {
	for _, w := range wider(r) {
		limits = append(limits, o.naming[w]...)
	}
	slices.Sort(limits)
	limits = slices.Compact(limits)
	return fmt.Sprint(limits), limits
}

// conditions returns the joint conditions of limits; nil if a selector is invalid.
func (o *ownership) conditions(key string, limits []int) conditions {
	if owned, known := o.owned[key]; known {
		return owned
	}
	owned := conditions{}
	for _, i := range limits {
		if o.limits[i].Selector == nil {
			continue
		}
		s, err := metav1.LabelSelectorAsSelector(o.limits[i].Selector)
		if err != nil {
			owned = nil // reported elsewhere
			break
		}
		more, ok := conditionsOf(s)
		if !ok {
			owned = nil
			break
		}
		owned.merge(more)
	}
	o.owned[key] = owned
	return owned
}

// object returns an object that both own, by its resource and labels; empty if there is none.
func (o *ownership) object(ctx context.Context, other *ownership) (string, error) {
	tried := map[[2]string]bool{}
	for _, r := range o.common(other) {
		mineKey, mineLimits := o.of(r)
		theirsKey, theirsLimits := other.of(r)
		pair := [2]string{mineKey, theirsKey}
		if tried[pair] {
			continue
		}
		tried[pair] = true
		if err := ctx.Err(); err != nil {
			return "", err
		}
		mine, theirs := o.conditions(mineKey, mineLimits), other.conditions(theirsKey, theirsLimits)
		if mine == nil || theirs == nil {
			continue
		}
		if example, ok := bothOwn(mine, theirs); ok {
			return fmt.Sprintf("%s with labels {%s}", r.Resource, example), nil
		}
	}
	return "", nil
}

// common returns the resources that both name, sorted. A name and "*" have the name in common.
func (o *ownership) common(other *ownership) (out []schema.GroupResource) {
	seen := map[schema.GroupResource]bool{}
	add := func(r schema.GroupResource) {
		if !seen[r] && o.names(r) && other.names(r) {
			seen[r] = true
			out = append(out, r)
		}
	}
	for _, pair := range [][2]*ownership{{o, other}, {other, o}} {
		for r := range pair[0].naming {
			add(r)
			if r.Resource != "*" {
				continue
			}
			for theirs := range pair[1].naming {
				if theirs.Group == "*" {
					add(schema.GroupResource{Group: r.Group, Resource: theirs.Resource})
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b schema.GroupResource) int {
		return cmp.Or(strings.Compare(a.Resource, b.Resource), strings.Compare(a.Group, b.Group))
	})
	return out
}

func (o *ownership) names(r schema.GroupResource) bool {
	return slices.ContainsFunc(wider(r), func(w schema.GroupResource) bool { return o.naming[w] != nil })
}

// wider returns all ways in which a limit can name a resource.
func wider(r schema.GroupResource) []schema.GroupResource {
	return []schema.GroupResource{r, {Group: "*", Resource: r.Resource}, {Group: r.Group, Resource: "*"}, {Group: "*", Resource: "*"}}
}

// bothOwn finds the labels of a stamped object that fulfil the conditions of both. The bucket
// follows from the namespace.
func bothOwn(mine, theirs conditions) (example labels.Set, overlap bool) {
	both := maps.Clone(mine)
	both.merge(theirs)
	stamped := conditions{}
	for _, key := range []string{v1alpha1.NamespaceLabel, v1alpha1.ShardingHashLabel} {
		if on := both[key]; on != nil {
			stamped[key] = on
			delete(both, key)
		}
	}
	if example, overlap = both.satisfy(); !overlap || len(stamped) == 0 {
		return example, overlap
	}
	namespace, overlap := stampedWith(stamped)
	return labels.Merge(example, namespace), overlap
}

// stampedWith finds the labels of a namespace's objects that fulfil conditions.
func stampedWith(stamped conditions) (labels.Set, bool) {
	of := func(namespace string) labels.Set {
		return labels.Set{v1alpha1.NamespaceLabel: namespace, v1alpha1.ShardingHashLabel: sharding.BucketLabel(namespace)}
	}
	if named := stamped[v1alpha1.NamespaceLabel]; named != nil && named.in != nil {
		for _, namespace := range slices.Sorted(maps.Keys(named.in)) {
			if set := of(namespace); stamped.matches(set) {
				return set, true
			}
		}
		return nil, false
	}
	if !anyBucket(stamped) {
		return nil, false
	}
	for i := 0; ; i++ { // ends: each bucket has infinitely many examples, and few are excluded
		if set := of(example(i)); stamped.matches(set) {
			return set, true
		}
	}
}

// anyBucket reports whether objects of some bucket can fulfil conditions that require no
// namespace.
func anyBucket(stamped conditions) bool {
	if named := stamped[v1alpha1.NamespaceLabel]; named != nil && named.absent {
		return false
	}
	on := stamped[v1alpha1.ShardingHashLabel]
	if on == nil {
		return true
	}
	for bucket := range sharding.Buckets {
		if on.allows(strconv.Itoa(bucket)) {
			return true
		}
	}
	return false
}
