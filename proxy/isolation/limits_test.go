package isolation

import (
	"fmt"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"pgregory.net/rapid"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

func resources(groups, names []string) *meshv1.ResourceGroup {
	return &meshv1.ResourceGroup{ApiGroups: groups, Resources: names}
}

func TestSelectorCombinesMatchingLimits(t *testing.T) {
	limits, err := compileLimits([]*meshv1.Limit{
		{Selector: "everywhere=1"},
		{Selector: "core=1", Resources: []*meshv1.ResourceGroup{resources([]string{""}, []string{"pods"})}},
		{Selector: "apps=1", Resources: []*meshv1.ResourceGroup{resources([]string{"apps"}, []string{"*"})}},
		{Selector: "any=1", Resources: []*meshv1.ResourceGroup{
			resources([]string{"x"}, []string{"y"}), resources([]string{"*"}, []string{"widgets"}),
		}},
	})
	require.NoError(t, err)
	for _, c := range []struct{ group, resource, want string }{
		{"", "pods", "core=1,everywhere=1"},
		{"metrics.k8s.io", "pods", "everywhere=1"},
		{"apps", "deployments", "apps=1,everywhere=1"},
		{"", "deployments", "everywhere=1"},
		{"aggregated.example.com", "widgets", "any=1,everywhere=1"},
		{"apps", "widgets", "any=1,apps=1,everywhere=1"},
	} {
		require.Equal(t, c.want, limits.Selector(schema.GroupResource{Group: c.group, Resource: c.resource}).String(), "%s/%s", c.group, c.resource)
	}
	require.Empty(t, Limits{}.Selector(schema.GroupResource{Group: "", Resource: "pods"}).String())
}

func TestLimitsApplyToAliases(t *testing.T) {
	for _, c := range []struct{ group, resource, asGroup, as string }{
		{"", "events", "events.k8s.io", "events"},
		{"events.k8s.io", "events", "", "events"},
		{"", "pods", "", "bindings"},
	} {
		limits, err := compileLimits([]*meshv1.Limit{{
			Selector: "a=b", Scope: sharding.Keys("x").Proto(),
			Resources: []*meshv1.ResourceGroup{resources([]string{c.group}, []string{c.resource})},
		}})
		require.NoError(t, err)
		require.Equal(t, "a=b", limits.Selector(schema.GroupResource{Group: c.asGroup, Resource: c.as}).String(), "%s as %s.%s", c.resource, c.as, c.asGroup)
		_, divided := limits.Scope(schema.GroupResource{Group: c.asGroup, Resource: c.as})
		require.True(t, divided)
		_, divided = limits.Scope(schema.GroupResource{Group: "example.com", Resource: c.as})
		require.False(t, divided)
	}
}

func TestLimitThatNarrowsNothingIsInvalid(t *testing.T) {
	for _, s := range []string{"", " ", "a in", "=", "a=b,,"} {
		_, err := compileLimits([]*meshv1.Limit{{Selector: s}})
		require.Error(t, err, "%q", s)
	}
}

func TestScopesOfLimitsIntersect(t *testing.T) {
	pods := resources([]string{""}, []string{"pods"})
	limits, err := compileLimits([]*meshv1.Limit{
		{Scope: sharding.Keys("a", "b").Proto(), Resources: []*meshv1.ResourceGroup{pods}},
		{Scope: sharding.Keys("b", "c").Proto(), Selector: "x=y", Resources: []*meshv1.ResourceGroup{pods}},
		{Scope: sharding.Scope{}.Proto(), Resources: []*meshv1.ResourceGroup{resources([]string{"apps"}, []string{"*"})}},
	})
	require.NoError(t, err)
	owned, divided := limits.Scope(schema.GroupResource{Group: "", Resource: "pods"})
	require.True(t, divided)
	require.True(t, owned.Equal(sharding.Keys("b")))
	require.Equal(t, "x=y", limits.Selector(schema.GroupResource{Group: "", Resource: "pods"}).String())

	owned, divided = limits.Scope(schema.GroupResource{Group: "apps", Resource: "deployments"})
	require.True(t, divided)
	require.True(t, owned.Empty())
	require.Nil(t, limits.Selector(schema.GroupResource{Group: "apps", Resource: "deployments"}))

	_, divided = limits.Scope(schema.GroupResource{Group: "", Resource: "services"})
	require.False(t, divided)

	_, err = compileLimits([]*meshv1.Limit{{Scope: &meshv1.Scope{Parts: []*meshv1.ScopePart{{}}}}})
	require.Error(t, err)
}

func TestNothingMatchesNothing(t *testing.T) {
	out, err := Nothing.Narrow("labelSelector=a%3Db")
	require.NoError(t, err)
	values, err := url.ParseQuery(out)
	require.NoError(t, err)
	sel, err := labels.Parse(values.Get("labelSelector"))
	require.NoError(t, err)
	require.False(t, sel.Matches(labels.Set{"a": "b"}))
	require.False(t, sel.Matches(labels.Set{"a": "b", v1alpha1.NamespaceLabel: "x"}))
}

func TestNarrow(t *testing.T) {
	limits, err := compileLimits([]*meshv1.Limit{{Selector: "shard in (1,2)"}})
	require.NoError(t, err)
	s := limits.Selector(schema.GroupResource{Group: "", Resource: "pods"})
	for _, c := range []struct{ name, raw, want string }{
		{"no selector", "limit=500&resourceVersion=0", "shard in (1,2)"},
		{"empty selector", "labelSelector=", "shard in (1,2)"},
		{"equality", "labelSelector=app%3Dweb", "app=web,shard in (1,2)"},
		{"raw equals sign", "labelSelector=app=web&fieldSelector=spec.nodeName=n1", "app=web,shard in (1,2)"},
		{"inequality", "labelSelector=app!%3Dweb", "app!=web,shard in (1,2)"},
		{"notin, exists, absent", "labelSelector=a+notin+(b,c),d,!e", "!e,a notin (b,c),d,shard in (1,2)"},
		{"greater", "labelSelector=gen%3E5", "gen>5,shard in (1,2)"},
		{"the shard's own key widens nothing", "labelSelector=shard%3D3", "shard in (1,2),shard=3"},
		{"the first value counts", "labelSelector=a%3D1&labelSelector=b%3D2", "a=1,shard in (1,2)"},
		{"an empty first value counts", "labelSelector=&labelSelector=b%3D2", "shard in (1,2)"},
		{"an encoded key is the key", "label%53elector=a%3D1", "a=1,shard in (1,2)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := s.Narrow(c.raw)
			require.NoError(t, err)
			before, err := url.ParseQuery(c.raw)
			require.NoError(t, err)
			after, err := url.ParseQuery(out)
			require.NoError(t, err)
			_, err = labels.Parse(after.Get("labelSelector"))
			require.NoError(t, err)
			require.Equal(t, c.want, after.Get("labelSelector"))
			require.Len(t, after["labelSelector"], 1)
			delete(before, "labelSelector")
			delete(after, "labelSelector")
			require.Equal(t, before, after)
		})
	}
	for _, raw := range []string{"labelSelector=a+in", "labelSelector=%zz", "a=1;b=2", "labelSelector=a%3D%3D%3D", "labelSelector=-x"} {
		_, err := s.Narrow(raw)
		require.Error(t, err, raw)
	}
}

var key = rapid.SampledFrom([]string{"a", "b", "example.com/c", "shard"})

var value = rapid.SampledFrom([]string{"", "x", "y", "1", "7"})

// requirement draws one requirement in the syntax of a query.
var requirement = rapid.Custom(func(t *rapid.T) string {
	k, v, w := key.Draw(t, "key"), value.Draw(t, "v"), value.Draw(t, "w")
	return rapid.SampledFrom([]string{
		k + "=" + v, k + "==" + v, k + "!=" + v, k, "!" + k, k + ">3", k + "<3",
		fmt.Sprintf("%s in (%s,%s)", k, v, w), fmt.Sprintf("%s notin (%s,%s)", k, v, w),
	}).Draw(t, "requirement")
})

var selector = rapid.Custom(func(t *rapid.T) string {
	out := requirement.Draw(t, "first")
	for _, r := range rapid.SliceOfN(requirement, 0, 3).Draw(t, "rest") {
		out += "," + r
	}
	return out
})

// An object matches what goes upstream if and only if it matches what the client
// asked and what the shard requires.
func TestNarrowedQueryRequiresBothSelectors(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		client, shard := selector.Draw(t, "client"), selector.Draw(t, "shard")
		object := labels.Set(rapid.MapOf(key, value).Draw(t, "object"))
		check(t, client, shard, object)
	})
}

func check(t require.TestingT, client, shard string, object labels.Set) {
	limits, err := compileLimits([]*meshv1.Limit{{Selector: shard}})
	require.NoError(t, err)
	out, err := limits.Selector(schema.GroupResource{Group: "", Resource: "pods"}).Narrow("labelSelector=" + url.QueryEscape(client))
	require.NoError(t, err)
	values, err := url.ParseQuery(out)
	require.NoError(t, err)
	merged, err := labels.Parse(values.Get("labelSelector"))
	require.NoError(t, err)
	a, err := labels.Parse(client)
	require.NoError(t, err)
	b, err := labels.Parse(shard)
	require.NoError(t, err)
	require.Equal(t, a.Matches(object) && b.Matches(object), merged.Matches(object),
		"client %q, shard %q, merged %q, object %v", a, b, merged, object)
}

func FuzzNarrow(f *testing.F) {
	f.Add("a=b", "x", "y")
	f.Add("a notin (b, c),!d,e>1", "shard", "1")
	f.Fuzz(func(t *testing.T, client, k, v string) {
		limits, err := compileLimits([]*meshv1.Limit{{Selector: "shard in (1,2)"}})
		require.NoError(t, err)
		out, err := limits.Selector(schema.GroupResource{Group: "", Resource: "pods"}).Narrow("labelSelector=" + url.QueryEscape(client))
		sel, parseErr := labels.Parse(client)
		require.Equal(t, parseErr == nil, err == nil, "%q: %v, %v", client, parseErr, err)
		if err != nil {
			return
		}
		values, err := url.ParseQuery(out)
		require.NoError(t, err)
		merged, err := labels.Parse(values.Get("labelSelector"))
		require.NoError(t, err)
		for _, object := range []labels.Set{{k: v}, {k: v, "shard": "1"}, {k: v, "shard": "3"}} {
			own := object["shard"] == "1" || object["shard"] == "2"
			require.Equal(t, own && sel.Matches(object), merged.Matches(object))
		}
	})
}
