package match

import (
	"fmt"
	"net/textproto"
	"slices"
	"strings"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// Kind is what the requests of a plan have in common.
type Kind struct {
	Verb, Group, Resource, Subresource string
	// Upgrade: a get of a subresource, which asks to change the protocol of its connection.
	Upgrade bool
	// MemberCluster: in a member cluster, behind a path of the apiserver.
	MemberCluster bool
}

// GroupResource returns the resource without its verb.
func (k Kind) GroupResource() schema.GroupResource {
	return schema.GroupResource{Group: k.Group, Resource: k.Resource}
}

var (
	writes   = []string{"create", "update", "patch", "delete", "deletecollection"}
	connects = []string{"exec", "attach", "portforward", "proxy"}
)

// Writes reports whether a request changes something, by its verb.
func (k Kind) Writes() bool { return slices.Contains(writes, k.Verb) }

// Connects reports whether a request opens a connection into a pod, a service or what another
// subresource leads to, as the console of a virtual machine, by any verb.
func (k Kind) Connects() bool {
	return k.Upgrade || k.Group == "" && slices.Contains(connects, k.Subresource)
}

// Storable reports whether parts of a path can be stored: the names of objects and resources
// are not longer, and are UTF-8.
func Storable(names ...string) bool {
	return !slices.ContainsFunc(names, func(s string) bool { return len(s) > 253 || !utf8.ValidString(s) })
}

// Clone returns a copy that does not keep the path in memory from which k was cut.
func (k Kind) Clone() Kind {
	return Kind{strings.Clone(k.Verb), strings.Clone(k.Group), strings.Clone(k.Resource), strings.Clone(k.Subresource), k.Upgrade, k.MemberCluster}
}

// Object is what differs between the resource requests of a plan.
type Object struct {
	Cluster, Namespace, Name string // Cluster is empty for that of the apiserver itself
	// Lock means that the request is about an operator lock, which matches only entries
	// that name it.
	Lock   bool
	Header header.Fields
}

// Resource is a compiled ResourceMatch.
type Resource struct {
	groups, verbs               set
	resources                   []resource
	clusters, namespaces, names set
	headers                     Headers
	scope                       meshv1.RequestScope
	wildcards                   int
}

type resource struct{ name, subresource string }

// NewResource compiles a match.
func NewResource(m *meshv1.ResourceMatch) (*Resource, error) {
	out := &Resource{
		groups: newSet(m.GetApiGroups()), verbs: newSet(m.GetVerbs()),
		clusters: newSet(m.GetClusters()), namespaces: newSet(m.GetNamespaces()), names: newSet(m.GetNames()), scope: m.GetScope(),
	}
	if _, known := meshv1.RequestScope_name[int32(out.scope)]; !known {
		return nil, fmt.Errorf("unknown scope %d", out.scope)
	}
	var err error
	if out.headers, err = NewHeaders(m.GetHeaders()); err != nil {
		return nil, err
	}
	for _, r := range m.GetResources() {
		if r == "*" {
			out.resources = nil
			break
		}
		name, sub, _ := strings.Cut(r, "/")
		if name == "" {
			return nil, fmt.Errorf("resource %q has no name", r)
		}
		out.resources = append(out.resources, resource{name, sub})
	}
	part := slices.ContainsFunc(out.resources, func(r resource) bool { return r.name == "*" || r.subresource == "*" })
	out.wildcards = 2*trues(out.groups.all(), out.verbs.all(), out.clusters.all(), out.namespaces.all(), out.names.all(), len(out.resources) == 0) + trues(part)
	if out.namespaces.all() && out.scope != meshv1.RequestScope_REQUEST_SCOPE_ALL {
		out.wildcards--
	}
	return out, nil
}

// trues returns how many conditions are true.
func trues(conditions ...bool) (n int) {
	for _, is := range conditions {
		if is {
			n++
		}
	}
	return n
}

// Wildcards returns how unspecific the match is: 2 for each condition that matches
// anything, and 1 if part of a resource's name does, or any namespace within a scope.
func (m *Resource) Wildcards() int { return m.wildcards }

// Of reports whether requests of a kind may match.
func (m *Resource) Of(k Kind) bool {
	return m.verbs.has(k.Verb) && m.groups.has(k.Group) && m.resource(k)
}

func (m *Resource) resource(k Kind) bool {
	return len(m.resources) == 0 || slices.ContainsFunc(m.resources, func(r resource) bool {
		return (r.name == "*" || r.name == k.Resource) && (r.subresource == k.Subresource || r.subresource == "*" && k.Subresource != "")
	})
}

// Match reports whether a request matches. Of must be true for the kind of the request.
func (m *Resource) Match(o *Object) bool {
	if o.Lock && m.names.all() || !m.clusters.has(o.Cluster) || !m.within(o.Namespace) || !m.namespaces.has(o.Namespace) || !m.names.has(o.Name) {
		return false
	}
	return !slices.ContainsFunc(m.headers, func(f header.Field) bool { return !slices.Contains(o.Header, f) })
}

// within reports whether the scope includes requests with a namespace in their path; "" is
// none.
func (m *Resource) within(namespace string) bool {
	return m.scope == meshv1.RequestScope_REQUEST_SCOPE_ALL || (namespace == "") == (m.scope == meshv1.RequestScope_REQUEST_SCOPE_CLUSTER)
}

// set is a sorted set of accepted values. Nil accepts all.
type set []string

func newSet(values []string) set {
	if len(values) == 0 || slices.Contains(values, "*") {
		return nil
	}
	return slices.Compact(slices.Sorted(slices.Values(values)))
}

// all reports whether the set accepts all values.
func (s set) all() bool { return s == nil }

// has is small enough to be inlined: most sets accept all.
func (s set) has(v string) bool { return s == nil || s.contains(v) }

func (s set) contains(v string) bool {
	if len(s) <= few { // faster than a search
		return slices.Contains(s, v)
	}
	_, ok := slices.BinarySearch(s, v)
	return ok
}

// Headers are conditions on headers, all of which must match.
type Headers header.Fields

// NewHeaders compiles matches.
func NewHeaders(matches []*meshv1.HeaderMatch) (out Headers, err error) {
	for _, m := range matches {
		if m.GetName() == "" {
			return nil, fmt.Errorf("header without a name")
		}
		out = append(out, header.Field{Name: textproto.CanonicalMIMEHeaderKey(m.GetName()), Value: m.GetValue()})
	}
	return out, nil
}

// Match reports whether a header of net/http has all of them.
func (h Headers) Match(of map[string][]string) bool {
	return !slices.ContainsFunc(h, func(f header.Field) bool { return !slices.Contains(of[f.Name], f.Value) })
}
