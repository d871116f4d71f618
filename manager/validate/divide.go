package validate

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/proxy/scope"
)

// divided finds another shard of the same operator, by its lock, that would own an
// object which this one owns, and gives the labels of such an object.
func divided(c *v1alpha1.ShardingConfig, others []v1alpha1.ShardingConfig) string {
	if c.Spec.Controller == nil {
		return ""
	}
	for _, o := range others {
		if o.Spec.Controller == nil || compile.Derived(&o) || o.Spec.Controller.LeaderElectionName != c.Spec.Controller.LeaderElectionName {
			continue
		}
		for _, resource := range common(divides(c), divides(&o)) {
			mine, ok1 := owned(divides(c), resource)
			theirs, ok2 := owned(divides(&o), resource)
			if !ok1 || !ok2 {
				continue // others say that
			}
			if example, ok := bothOwn(mine, theirs); ok {
				return fmt.Sprintf("spec.limits: %s with labels {%s} would be owned by this and by ShardingConfig %s, which shares the lock %s: make the selectors exclude each other, or take the object from the other one first",
					resource.name, example, o.Name, o.Spec.Controller.LeaderElectionName)
			}
		}
	}
	return ""
}

// divides are the limits of a configuration, or of the shards that it derives.
func divides(c *v1alpha1.ShardingConfig) []v1alpha1.ObjectLimiter {
	if c.Spec.Root == nil {
		return c.Spec.Limits
	}
	return slices.Concat(c.Spec.Root.ResourceSelector, c.Spec.Limits)
}

type resource struct{ group, name string } // group may be "*"

// common are the resources that both limits name.
func common(a, b []v1alpha1.ObjectLimiter) (out []resource) {
	for _, l := range a {
		for _, r := range l.RelateResources {
			for _, g := range r.APIGroups {
				for _, name := range r.Resources {
					out = append(out, inBoth(resource{g, name}, b)...)
				}
			}
		}
	}
	return out
}

// inBoth is a resource as it is named in limits too: the narrower of the groups.
func inBoth(r resource, limits []v1alpha1.ObjectLimiter) (out []resource) {
	for _, l := range limits {
		for _, other := range l.RelateResources {
			if !slices.Contains(other.Resources, r.name) {
				continue
			}
			for _, g := range other.APIGroups {
				switch {
				case g == r.group || g == "*":
					out = append(out, r)
				case r.group == "*":
					out = append(out, resource{g, r.name})
				}
			}
		}
	}
	return out
}

// owned is what limits leave of a resource: all that name it apply together. Not
// ok if a selector is none.
func owned(limits []v1alpha1.ObjectLimiter, r resource) (selector labels.Selector, ok bool) {
	selector = labels.NewSelector()
	for _, l := range limits {
		names := slices.ContainsFunc(l.RelateResources, func(g v1alpha1.ResourceGroup) bool {
			return slices.Contains(g.Resources, r.name) && (slices.Contains(g.APIGroups, r.group) || slices.Contains(g.APIGroups, "*"))
		})
		if !names || l.Selector == nil {
			continue
		}
		s, err := metav1.LabelSelectorAsSelector(l.Selector)
		if err != nil {
			return nil, false
		}
		if _, selectable := s.Requirements(); !selectable {
			return nil, false
		}
		selector = selector.Add(requirements(s)...)
	}
	return selector, true
}

// bothOwn is Overlap for objects that bear the mesh's labels: the bucket follows
// from the namespace.
func bothOwn(a, b labels.Selector) (example labels.Set, overlap bool) {
	ours, aRest := split(a)
	theirs, bRest := split(b)
	if example, overlap = Overlap(aRest, bRest); !overlap {
		return nil, false
	}
	both := ours.Add(requirements(theirs)...)
	if both.Empty() {
		return example, true
	}
	for _, namespace := range namespaces(both) {
		set := labels.Set{v1alpha1.NamespaceLabel: namespace, v1alpha1.ShardingHashLabel: scope.BucketLabel(namespace)}
		if both.Matches(set) {
			return labels.Merge(example, set), true
		}
	}
	return nil, false
}

// split is the requirements on the labels that the mesh stamps, and the others.
func split(s labels.Selector) (stamped, rest labels.Selector) {
	stamped, rest = labels.NewSelector(), labels.NewSelector()
	for _, r := range requirements(s) {
		if r.Key() == v1alpha1.NamespaceLabel || r.Key() == v1alpha1.ShardingHashLabel {
			stamped = stamped.Add(r)
		} else {
			rest = rest.Add(r)
		}
	}
	return stamped, rest
}

func requirements(s labels.Selector) labels.Requirements {
	r, _ := s.Requirements() // all are selectable here
	return r
}

// namespaces are some of which one matches if any does: those that are named, and
// for each bucket more than are named.
func namespaces(s labels.Selector) (out []string) {
	for _, r := range requirements(s) {
		if r.Key() == v1alpha1.NamespaceLabel {
			out = append(out, r.ValuesUnsorted()...)
		}
	}
	named := len(out)
	var perBucket [scope.Buckets]int
	for i, full := 0, 0; full < scope.Buckets; i++ {
		name := fmt.Sprintf("example-%d", i)
		if b := scope.Bucket(name); perBucket[b] <= named {
			out = append(out, name)
			if perBucket[b]++; perBucket[b] > named {
				full++
			}
		}
	}
	slices.SortStableFunc(out[:named], strings.Compare)
	return out
}
