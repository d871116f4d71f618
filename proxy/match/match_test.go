package match

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

func TestResource(t *testing.T) {
	get := func(resource, subresource string) Kind {
		return Kind{Verb: "get", Resource: resource, Subresource: subresource}
	}
	for _, tt := range []struct {
		resources string
		kind      Kind
		want      bool
	}{
		{"pods", get("pods", ""), true},
		{"pods", get("pods", "status"), false},
		{"pods", get("nodes", ""), false},
		{"pods/status", get("pods", "status"), true},
		{"pods/status", get("pods", ""), false},
		{"pods/*", get("pods", "status"), true},
		{"pods/*", get("pods", ""), false},
		{"*/status", get("nodes", "status"), true},
		{"*/status", get("nodes", "scale"), false},
		{"*", get("nodes", ""), true},
		{"*", get("nodes", "status"), true},
	} {
		m, err := NewResource(&meshv1.ResourceMatch{Resources: []string{tt.resources}})
		require.NoError(t, err)
		require.Equal(t, tt.want, m.Of(tt.kind), "%s of %+v", tt.resources, tt.kind)
	}
	_, err := NewResource(&meshv1.ResourceMatch{Resources: []string{"/status"}})
	require.Error(t, err)

	m, err := NewResource(&meshv1.ResourceMatch{ApiGroups: []string{"apps"}, Verbs: []string{"update"}})
	require.NoError(t, err)
	require.True(t, m.Of(Kind{Verb: "update", Group: "apps", Resource: "deployments"}))
	require.False(t, m.Of(Kind{Verb: "update", Resource: "pods"}))
	require.False(t, m.Of(Kind{Verb: "get", Group: "apps", Resource: "deployments"}))
}

func TestObject(t *testing.T) {
	var many []string
	for i := range 2 * few {
		many = append(many, fmt.Sprint("ns-", i))
	}
	for _, namespaces := range [][]string{{"ns-0", "ns-1"}, many} {
		m, err := NewResource(&meshv1.ResourceMatch{
			Namespaces: namespaces, Headers: []*meshv1.HeaderMatch{{Name: "x-test", Value: "yes"}}})
		require.NoError(t, err)
		with := header.Fields{{Name: "X-Test", Value: "no"}, {Name: "X-Test", Value: "yes"}}
		require.True(t, m.Match(&Object{Namespace: "ns-1", Header: with}))
		require.False(t, m.Match(&Object{Namespace: "other", Header: with}))
		require.False(t, m.Match(&Object{Namespace: "ns-1", Header: header.Fields{{Name: "X-Test", Value: "no"}}}))
		require.False(t, m.Match(&Object{Namespace: "", Header: with}))
	}
}

// A lock is nobody's but his who names it.
func TestLock(t *testing.T) {
	for _, tt := range []struct {
		names []string
		want  bool
	}{{nil, false}, {[]string{"*"}, false}, {[]string{"other"}, false}, {[]string{"leader"}, true}} {
		m, err := NewResource(&meshv1.ResourceMatch{Names: tt.names})
		require.NoError(t, err)
		require.Equal(t, tt.want, m.Match(&Object{Namespace: "ns", Name: "leader", Lock: true}), "%q", tt.names)
	}
}

func TestWildcards(t *testing.T) {
	of := func(groups, resources, verbs, namespaces, names string, clusters ...string) int {
		m, err := NewResource(&meshv1.ResourceMatch{ApiGroups: []string{groups}, Resources: []string{resources},
			Verbs: []string{verbs}, Namespaces: []string{namespaces}, Names: []string{names}, Clusters: clusters})
		require.NoError(t, err)
		return m.Wildcards()
	}
	all := of("*", "*", "*", "*", "*")
	require.Less(t, of("*", "*/status", "*", "*", "*"), all)
	require.Less(t, of("*", "pods", "*", "*", "*"), of("*", "*/status", "*", "*", "*"))
	require.Equal(t, of("*", "*", "get", "*", "*"), of("*", "*", "*", "ns", "*"))
	require.Less(t, of("*", "*", "*", "*", "*", "one"), all)
	require.Zero(t, of("apps", "deployments", "get", "ns", "one", ""))
}

func TestScopeDividesRequestsByTheirNamespace(t *testing.T) {
	for _, tt := range []struct {
		scope      meshv1.RequestScope
		namespaces []string
		in, out    bool
	}{
		{meshv1.RequestScope_REQUEST_SCOPE_ALL, nil, true, true},
		{meshv1.RequestScope_REQUEST_SCOPE_ALL, []string{"ns"}, true, false},
		{meshv1.RequestScope_REQUEST_SCOPE_NAMESPACED, []string{"*"}, true, false},
		{meshv1.RequestScope_REQUEST_SCOPE_NAMESPACED, []string{"other"}, false, false},
		{meshv1.RequestScope_REQUEST_SCOPE_CLUSTER, []string{"*"}, false, true},
		{meshv1.RequestScope_REQUEST_SCOPE_CLUSTER, []string{"ns"}, false, false},
	} {
		m, err := NewResource(&meshv1.ResourceMatch{Scope: tt.scope, Namespaces: tt.namespaces})
		require.NoError(t, err)
		require.Equal(t, tt.in, m.Match(&Object{Namespace: "ns"}), "%s %q, in a namespace", tt.scope, tt.namespaces)
		require.Equal(t, tt.out, m.Match(&Object{}), "%s %q, in none", tt.scope, tt.namespaces)
	}
	_, err := NewResource(&meshv1.ResourceMatch{Scope: 99})
	require.ErrorContains(t, err, "unknown scope")
}

func TestScopeIsMoreSpecificThanAllRequests(t *testing.T) {
	of := func(scope meshv1.RequestScope, namespaces ...string) int {
		m, err := NewResource(&meshv1.ResourceMatch{Scope: scope, Namespaces: namespaces})
		require.NoError(t, err)
		return m.Wildcards()
	}
	all, namespaced, cluster := meshv1.RequestScope_REQUEST_SCOPE_ALL, meshv1.RequestScope_REQUEST_SCOPE_NAMESPACED, meshv1.RequestScope_REQUEST_SCOPE_CLUSTER
	require.Less(t, of(namespaced), of(all))
	require.Equal(t, of(namespaced), of(cluster))
	require.Less(t, of(all, "ns"), of(namespaced))
	require.Equal(t, of(all, "ns"), of(namespaced, "ns"))
}

func TestURL(t *testing.T) {
	exactly := func(s string) *meshv1.TextMatch { return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: s}} }
	ends := func(s string) *meshv1.TextMatch { return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Suffix{Suffix: s}} }
	starts := func(s string) *meshv1.TextMatch { return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Prefix{Prefix: s}} }
	matches := func(s string) *meshv1.TextMatch { return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: s}} }
	seen := HTTP{Scheme: "http", Host: "api.example.com", Port: 80, Method: "GET", Path: "/v1/a"}
	opaque := HTTP{Scheme: "https", Host: "api.example.com", Port: 443, Opaque: true}
	for _, tt := range []struct {
		name  string
		match *meshv1.HttpMatch
		req   HTTP
		want  Verdict
	}{
		{"anything", &meshv1.HttpMatch{}, seen, Yes},
		{"anything, hidden", &meshv1.HttpMatch{}, HTTP{Scheme: "https", Opaque: true}, Yes},
		{"host", &meshv1.HttpMatch{Host: exactly("api.example.com")}, opaque, Yes},
		{"another host", &meshv1.HttpMatch{Host: exactly("example.com")}, opaque, No},
		{"host, hidden", &meshv1.HttpMatch{Host: exactly("api.example.com")}, HTTP{Scheme: "https", Opaque: true}, Unseen},
		{"below a domain", &meshv1.HttpMatch{Host: ends(".example.com")}, seen, Yes},
		{"scheme", &meshv1.HttpMatch{Scheme: "https"}, seen, No},
		{"port", &meshv1.HttpMatch{Port: 8080}, seen, No},
		{"path", &meshv1.HttpMatch{Path: starts("/v1/")}, seen, Yes},
		{"another path", &meshv1.HttpMatch{Path: exactly("/v1/")}, seen, No},
		{"path, in TLS", &meshv1.HttpMatch{Path: starts("/")}, opaque, Unseen},
		{"path, in TLS to another host", &meshv1.HttpMatch{Host: exactly("b"), Path: starts("/")}, opaque, No},
		{"method", &meshv1.HttpMatch{Methods: []string{"POST"}}, seen, No},
		{"expression of all of the host", &meshv1.HttpMatch{Host: matches("api|www")}, seen, No},
		{"expression", &meshv1.HttpMatch{Host: matches(`(api|www)\.example\.com`)}, seen, Yes},
	} {
		t.Run(tt.name, func(t *testing.T) {
			u, err := NewURL(tt.match)
			require.NoError(t, err)
			require.Equal(t, tt.want, u.Match(&tt.req))
		})
	}
	_, err := NewURL(&meshv1.HttpMatch{Host: matches("(")})
	require.Error(t, err)
}

func TestPath(t *testing.T) {
	p := NewPath(&meshv1.PathMatch{Paths: []string{"/healthz", "/metrics/*", ""}, Verbs: []string{"get"}})
	require.True(t, p.Match("get", "/healthz"))
	require.True(t, p.Match("get", "/metrics/cadvisor"))
	require.False(t, p.Match("get", "/healthz/etcd"))
	require.False(t, p.Match("post", "/healthz"))
}

func TestStorable(t *testing.T) {
	require.True(t, Storable("ns", strings.Repeat("x", 253)))
	require.False(t, Storable("ns", strings.Repeat("x", 254)))
	require.False(t, Storable("ns", "a\xff"))
}
