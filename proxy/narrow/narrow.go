// Package narrow joins label selectors to what a shard lists, watches and deletes
// in bulk.
//
// A policy's limits are compiled once. For a group and resource they yield the
// requirements that must hold besides the client's own; Selector.Narrow ANDs
// the two as parsed requirements, never as strings.
package narrow

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
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
}

// Compile parses the selectors of limits. A limit without a selector would
// narrow nothing while it claims to, so it is an error.
func Compile(limits []*meshv1.Limit) (Limits, error) {
	out := make(Limits, 0, len(limits))
	for i, l := range limits {
		reqs, err := labels.ParseToRequirements(l.GetSelector())
		if err != nil {
			return nil, fmt.Errorf("limit %d: selector %q: %w", i, l.GetSelector(), err)
		}
		if len(reqs) == 0 {
			return nil, fmt.Errorf("limit %d: selector %q requires nothing", i, l.GetSelector())
		}
		out = append(out, limit{groups: l.GetResources(), requirements: reqs})
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

func (l limit) matches(group, resource string) bool {
	if len(l.groups) == 0 {
		return true
	}
	return slices.ContainsFunc(l.groups, func(g *meshv1.ResourceGroup) bool {
		return has(g.GetApiGroups(), group) && has(g.GetResources(), resource)
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
