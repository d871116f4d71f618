package review

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/review/route"
)

func TestRoutesOfAMessage(t *testing.T) {
	pods := []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"pods"}}}
	m := &meshv1.Webhook{
		DefaultShard: "two",
		Owners: []*meshv1.Owner{
			{Shard: "one", Scope: sharding.Keys("a").Proto()}, {Shard: "two", Scope: sharding.Keys("b", "c").Proto()},
		},
		Shared: []*meshv1.SharedObjects{
			{Resources: pods, Namespaces: []string{"b"}, Names: []string{"everyone"}, WriteAll: true},
			{Resources: pods, Namespaces: []string{"b"}, Names: []string{"readers"}},
		},
		Limits: []*meshv1.Limit{{Resources: pods, Scope: sharding.Keys("a", "b").Proto()}},
		Ready:  []*meshv1.ReadyPods{{Shard: "two", Addresses: []string{"192.0.2.1", "2001:db8::1"}}},
	}
	r, err := Compile(m, "one")
	require.NoError(t, err)
	require.Equal(t, map[string][]netip.Addr{"two": {netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}, r.Pods)
	about := func(resource, namespace, name string) route.Head {
		return route.Head{Review: route.Admission, Resource: schema.GroupVersionResource{Version: "v1", Resource: resource}, Namespace: namespace, Name: name}
	}
	for name, c := range map[string]struct {
		head route.Head
		want route.Decision
	}{
		"own":                     {about("pods", "a", "x"), route.Decision{Reason: route.Owned}},
		"of another shard":        {about("pods", "b", "x"), route.Decision{Action: route.Forward, Shard: "two", Reason: route.Owned}},
		"everyone writes it":      {about("pods", "b", "everyone"), route.Decision{Reason: route.Shared}},
		"everyone reads it":       {about("pods", "b", "readers"), route.Decision{Action: route.Forward, Shard: "two", Reason: route.Owned}},
		"outside the limits":      {about("pods", "c", "x"), route.Decision{Action: route.Allow, Reason: route.OutsideLimits}},
		"of a resource unlimited": {about("services", "c", "x"), route.Decision{Action: route.Forward, Shard: "two", Reason: route.Owned}},
		"in no namespace":         {about("nodes", "", "x"), route.Decision{Action: route.Forward, Shard: "two", Reason: route.ClusterScoped}},
		"between owners":          {about("services", "d", "x"), route.Decision{Reason: route.Unknown}},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, r.Decide(c.head, false)) })
	}

	for name, change := range map[string]func(*meshv1.Webhook){
		"address": func(m *meshv1.Webhook) { m.Ready[0].Addresses[0] = "pod" },
		"scope": func(m *meshv1.Webhook) {
			m.Owners[0].Scope.Parts[0].Ranges = []*meshv1.KeyRange{{First: 2, Last: 1}}
		},
	} {
		t.Run("invalid "+name, func(t *testing.T) {
			change(m)
			_, err := Compile(m, "one")
			require.ErrorContains(t, err, "routes of reviews")
		})
	}
}
