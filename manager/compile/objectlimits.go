package compile

import (
	"fmt"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// objectLimits are the limits of one configuration: those of spec.root.resourceSelector first, then
// those of spec.limits. A long selector takes a tenth of a second to read, so they are kept from
// one Compile for the next.
type objectLimits struct {
	limits  []*objectLimit
	problem *Problem
}

// objectLimit is one limit, without its namespaces.
type objectLimit struct {
	of        v1alpha1.ObjectLimiter
	resources []*meshv1.ResourceGroup
	selects   labels.Selector // nil: all objects
	selector  string
	scope     *meshv1.Scope // by selects; nil until asked, or if there is none
	read      bool          // scope was read
	// confined reports whether shards of a root own at most what is within, the scope of the
	// names.
	confined bool
	names    []string
	within   sharding.Scope
	// permitted is within in its wire form; nil unless confined.
	permitted *meshv1.Scope
}

// maxNames is how many namespaces the limits of one root may name and match, where a list that
// follows an equal one does not count. A policy of a pod has room for them.
const maxNames = 100_000

// limits reads the limits of a configuration, unless they are those of the last Compile.
func (c *compilation) limits(config *v1alpha1.ShardingConfig) (out objectLimits) {
	path, in := "spec.limits", config.Spec.Limits
	first := 0
	if r := config.Spec.Root; r != nil {
		in, first = slices.Concat(r.ResourceSelector, in), len(r.ResourceSelector)
	}
	before := c.cache.limits[origin.Of(config)].limits
	for i, l := range in {
		l.Namespaces = nil
		if i < len(before) && equality.Semantic.DeepEqual(before[i].of, l) {
			out.limits = append(out.limits, before[i])
			continue
		}
		at := fmt.Sprintf("%s[%d]", path, i-first)
		if i < first {
			at = fmt.Sprintf("spec.root.resourceSelector[%d]", i)
		}
		one, problem := newLimit(l, at)
		if problem != nil {
			return objectLimits{problem: problem}
		}
		out.limits = append(out.limits, one)
	}
	c.read[origin.Of(config)] = out
	return out
}

func newLimit(l v1alpha1.ObjectLimiter, path string) (*objectLimit, *Problem) {
	out := &objectLimit{of: l, resources: collect.Map(l.RelateResources, func(r v1alpha1.ResourceGroup) *meshv1.ResourceGroup {
		return &meshv1.ResourceGroup{ApiGroups: r.APIGroups, Resources: r.Resources}
	})}
	if l.Selector != nil {
		var err error
		if out.selects, err = metav1.LabelSelectorAsSelector(l.Selector); err != nil {
			return nil, &Problem{v1alpha1.ReasonInvalid, fmt.Sprintf("%s.selector: %v", path, err)}
		}
		out.selector = out.selects.String()
	}
	return out, nil
}

// confine sets the namespaces to which the limits of a root confine its shards.
func (l objectLimits) confine(c *v1alpha1.ShardingConfig) *Problem {
	if l.problem != nil {
		return l.problem
	}
	total := 0
	var before *objectLimit
	for i, of := range slices.Concat(c.Spec.Root.ResourceSelector, c.Spec.Limits) {
		one := l.limits[i]
		if one.confined = len(of.Namespaces) > 0; !one.confined {
			one.permitted = nil
			continue
		}
		names := layout.Named(of.Namespaces)
		if before != nil && slices.Equal(before.names, names) {
			one.names, one.within, one.permitted = before.names, before.within, before.permitted
			continue
		}
		if total += len(names); total > maxNames {
			return &Problem{v1alpha1.ReasonInvalid, fmt.Sprintf("the namespaces of spec.root.resourceSelector and spec.limits are more than %d together: match fewer, or list resources with the same namespaces one after the other", maxNames)}
		}
		if one.permitted == nil || !slices.Equal(one.names, names) {
			one.names, one.within = names, sharding.Keys(names...)
			one.permitted = one.within.Proto()
		}
		before = one
	}
	return nil
}

// render renders resources and selectors.
func (l objectLimits) render() []*meshv1.Limit {
	return collect.Map(l.limits, func(l *objectLimit) *meshv1.Limit {
		return &meshv1.Limit{Resources: l.resources, Selector: l.selector, Within: l.permitted}
	})
}

// asked returns the scope that the selector asks for; nil if it asks for none.
func (l *objectLimit) asked() *meshv1.Scope {
	if !l.read {
		l.read = true
		if s, ok := selectorScope(l.selects); ok {
			l.scope = s.Proto()
		}
	}
	return l.scope
}

// selectorScope returns the namespaces whose objects a selector may match, derived from
// its requirements on stamped labels. It ignores requirements on other labels. ok is false
// if no requirement can be expressed as a scope.
func selectorScope(selector labels.Selector) (s sharding.Scope, ok bool) {
	if selector == nil {
		return sharding.Scope{}, false
	}
	requirements, _ := selector.Requirements()
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
