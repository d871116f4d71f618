// Package narrow holds the limits of a shard, and joins label selectors to what it
// lists, watches and deletes in bulk.
//
// A policy's limits are compiled once. For a group and resource they yield the
// requirements that must hold besides the client's own, and the keys that are the
// shard's. Selector.Narrow ANDs requirements with the client's as parsed ones,
// never as strings.
package narrow

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

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
}

// Compile parses the selectors and scopes of limits. A limit without either would
// narrow nothing while it claims to, so it is an error.
func Compile(limits []*meshv1.Limit) (Limits, error) {
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
		out = append(out, limit{groups: l.GetResources(), requirements: reqs, scope: owned, divides: l.GetScope() != nil})
	}
	return out, nil
}

// For returns what every limit that matches the resource requires together, nil
// when none does. The core group is "".
func (l Limits) For(group, resource string) *Selector {
	var reqs labels.Requirements
	for _, x := range l {
		if x.matches(group, resource) {
			reqs = append(reqs, x.requirements...)
		}
	}
	if len(reqs) == 0 {
		return nil
	}
	return &Selector{requirements: reqs, text: render(reqs)}
}

// Scope returns the keys of a resource that are the shard's. The resource is not
// divided when no limit that matches it has a scope.
func (l Limits) Scope(group, resource string) (owned sharding.Scope, divided bool) {
	owned = sharding.All()
	for _, x := range l {
		if x.divides && x.matches(group, resource) {
			owned, divided = owned.Intersect(x.scope), true
		}
	}
	return owned, divided
}

// Owned returns the keys of any resource that are the shard's. Nothing is divided
// when no limit has a scope.
func (l Limits) Owned() (owned sharding.Scope, divided bool) {
	for _, x := range l {
		if x.divides {
			owned, divided = sharding.Union(owned, x.scope), true
		}
	}
	return owned, divided
}

// Emptied returns limits of the same resources that leave nothing of them.
func (l Limits) Emptied() Limits {
	out := make(Limits, len(l))
	for i, x := range l {
		out[i] = limit{groups: x.groups, requirements: Nothing.requirements, divides: true}
	}
	return out
}

type resource struct{ group, name string }

// alias is another name under which the apiserver serves the same objects: what
// limits the one limits the other.
var alias = map[resource]resource{
	{"", "events"}:              {"events.k8s.io", "events"},
	{"events.k8s.io", "events"}: {"", "events"},
	{"", "bindings"}:            {"", "pods"}, // a create of one writes to the pod
}

func (l limit) matches(group, name string) bool {
	if l.names(resource{group, name}) {
		return true
	}
	other, ok := alias[resource{group, name}]
	return ok && l.names(other)
}

// Matches reports whether groups name a resource, or another name of it.
func Matches(groups []*meshv1.ResourceGroup, group, name string) bool {
	return len(groups) > 0 && limit{groups: groups}.matches(group, name)
}

func (l limit) names(r resource) bool {
	return len(l.groups) == 0 || slices.ContainsFunc(l.groups, func(g *meshv1.ResourceGroup) bool {
		return has(g.GetApiGroups(), r.group) && has(g.GetResources(), r.name)
	})
}

func has(list []string, s string) bool {
	return slices.Contains(list, s) || slices.Contains(list, all)
}

// Selector is what a shard requires of one resource.
type Selector struct {
	requirements labels.Requirements
	text         string
}

// String is the selector in canonical form; "" for nil. Two selectors with the
// same text ask the same.
func (s *Selector) String() string {
	if s == nil {
		return ""
	}
	return s.text
}

// Nothing is what no object has: a list of it is empty, and a watch quiet, and
// both are otherwise as any other.
var Nothing = func() *Selector {
	reqs, err := labels.ParseToRequirements(v1alpha1.NamespaceLabel + ",!" + v1alpha1.NamespaceLabel)
	if err != nil {
		panic(err)
	}
	return &Selector{requirements: reqs, text: render(reqs)}
}()

// Narrow returns the raw query with its labelSelector ANDed with s. All other
// parameters keep their bytes and their order. The error tells the client what
// is wrong with its query or selector, as the apiserver would.
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

// render is the canonical text of requirements: sorted, each said once.
func render(reqs labels.Requirements) string {
	texts := make([]string, len(reqs))
	for i := range reqs {
		texts[i] = reqs[i].String()
	}
	slices.Sort(texts)
	return strings.Join(slices.Compact(texts), ",")
}
