package isolation

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
)

const (
	all           = "*"
	labelSelector = "labelSelector"
)

// Limits are the compiled limits of one policy.
type Limits []limit

type limit struct {
	groups       []*meshv1.ResourceGroup
	requirements labels.Requirements
	scope        sharding.Scope
	divides      bool // by the scope
	within       sharding.Scope
	confines     bool // to within
}

// compileLimits parses the selectors and scopes of limits. A limit without either narrows
// nothing, which is an error.
func compileLimits(limits []*meshv1.Limit) (Limits, error) {
	out := make(Limits, 0, len(limits))
	for i, l := range limits {
		reqs, err := labels.ParseToRequirements(l.GetSelector())
		if err != nil {
			return nil, fmt.Errorf("limit %d: selector %q: %w", i, l.GetSelector(), err)
		}
		if len(reqs) == 0 && l.GetScope() == nil {
			return nil, fmt.Errorf("limit %d: selector %q requires nothing", i, l.GetSelector())
		}
		owned, err := sharding.FromProto(l.GetScope())
		if err != nil {
			return nil, fmt.Errorf("limit %d: %w", i, err)
		}
		within, err := sharding.FromProto(l.GetWithin())
		if err != nil {
			return nil, fmt.Errorf("limit %d: %w", i, err)
		}
		out = append(out, limit{groups: l.GetResources(), requirements: reqs, scope: owned, divides: l.GetScope() != nil, within: within, confines: l.GetWithin() != nil})
	}
	return out, nil
}

// Selects reports whether some limit of a resource requires something of labels.
func (l Limits) Selects(res schema.GroupResource) bool {
	return slices.ContainsFunc(l, func(x limit) bool { return len(x.requirements) > 0 && x.matches(res) })
}

// Selector returns what all limits of a resource require of labels, nil for nothing.
func (l Limits) Selector(res schema.GroupResource) *Selector {
	var reqs labels.Requirements
	for _, x := range l {
		if x.matches(res) {
			reqs = append(reqs, x.requirements...)
		}
	}
	if len(reqs) == 0 {
		return nil
	}
	return &Selector{requirements: reqs, text: render(reqs)}
}

// Scope returns the keys of a resource that the shard owns; false if no limit of the
// resource has a scope, so that it is not divided.
func (l Limits) Scope(res schema.GroupResource) (owned sharding.Scope, divided bool) {
	owned = sharding.All()
	for _, x := range l {
		if x.divides && x.matches(res) {
			owned, divided = owned.Intersect(x.scope), true
		}
	}
	return owned, divided
}

// Within returns the keys of a resource that any shard may read and write; false if that is
// all keys.
func (l Limits) Within(res schema.GroupResource) (within sharding.Scope, confined bool) {
	within = sharding.All()
	for _, x := range l {
		if x.confines && x.matches(res) {
			within, confined = within.Intersect(x.within), true
		}
	}
	return within, confined
}

// Divides reports whether some limit has a scope.
func (l Limits) Divides() bool {
	return slices.ContainsFunc(l, func(x limit) bool { return x.divides })
}

// owned returns the keys of any resource that the shard owns; false if nothing is divided.
func (l Limits) owned() (owned sharding.Scope, divided bool) {
	for _, x := range l {
		if x.divides {
			owned, divided = sharding.Union(owned, x.scope), true
		}
	}
	return owned, divided
}

// emptied returns limits of the same resources by which the shard owns nothing.
func (l Limits) emptied() Limits {
	out := make(Limits, len(l))
	for i, x := range l {
		out[i] = limit{groups: x.groups, requirements: Nothing.requirements, divides: true, within: x.within, confines: x.confines}
	}
	return out
}

// alias is another name under which the apiserver serves the same objects. A limit of one
// applies to the other.
var alias = map[schema.GroupResource]schema.GroupResource{
	{Resource: "events"}:                         {Group: "events.k8s.io", Resource: "events"},
	{Group: "events.k8s.io", Resource: "events"}: {Resource: "events"},
	bindings: {Resource: "pods"}, // to create one writes to the pod
}

func (l limit) matches(res schema.GroupResource) bool {
	return len(l.groups) == 0 || matchesGroups(l.groups, res)
}

// matchesGroups reports whether groups contain a resource, or its alias.
func matchesGroups(groups []*meshv1.ResourceGroup, res schema.GroupResource) bool {
	other, ok := alias[res]
	return names(groups, res) || ok && names(groups, other)
}

// names reports whether groups contain a resource.
func names(groups []*meshv1.ResourceGroup, res schema.GroupResource) bool {
	return slices.ContainsFunc(groups, func(g *meshv1.ResourceGroup) bool {
		return contains(g.GetApiGroups(), res.Group) && contains(g.GetResources(), res.Resource)
	})
}

func contains(list []string, s string) bool {
	return slices.Contains(list, s) || slices.Contains(list, all)
}

// Selector is what a shard requires of the labels of one resource.
type Selector struct {
	requirements labels.Requirements
	text         string
}

// String returns the selector in canonical form; "" for nil. Selectors with the same text
// select the same.
func (s *Selector) String() string {
	if s == nil {
		return ""
	}
	return s.text
}

// Nothing selects no object: a list with it is empty, and a watch has no events, and both
// are otherwise as any other.
var Nothing = func() *Selector {
	reqs, err := labels.ParseToRequirements(v1alpha1.NamespaceLabel + ",!" + v1alpha1.NamespaceLabel)
	if err != nil {
		panic(err)
	}
	return &Selector{requirements: reqs, text: render(reqs)}
}()

// Narrow returns the raw query with its labelSelector ANDed with s, as parsed requirements
// and never as strings. All other parameters keep their bytes and their order. The error
// says what is wrong with the client's query or selector, as the apiserver would.
func (s *Selector) Narrow(raw string) (string, error) {
	client, _, err := query.Get(raw, labelSelector)
	if err != nil {
		return "", err
	}
	if client == "" {
		return query.Set(raw, labelSelector, s.text)
	}
	reqs, err := labels.ParseToRequirements(client)
	if err != nil {
		return "", fmt.Errorf("unable to parse labelSelector: %w", err)
	}
	return query.Set(raw, labelSelector, render(append(slices.Clip(reqs), s.requirements...)))
}

// render returns the canonical text of requirements, sorted and without duplicates.
func render(reqs labels.Requirements) string {
	texts := make([]string, len(reqs))
	for i := range reqs {
		texts[i] = reqs[i].String()
	}
	slices.Sort(texts)
	return strings.Join(slices.Compact(texts), ",")
}
