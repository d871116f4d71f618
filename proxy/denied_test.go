package proxy

import (
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// denying is a shard that owns all ConfigMaps, and denies some clients.
func denying(agents ...string) *meshv1.Sharding {
	return &meshv1.Sharding{Shard: "s1", ReadAll: true, DeniedUserAgents: agents, Limits: []*meshv1.Limit{{
		Scope:     sharding.All().Proto(),
		Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"configmaps"}}},
	}}}
}

func TestDeniedUserAgentsFindNothing(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(true, twenty()...))
	c := m.client(true)
	const client = "Go-http-client/2.0"
	m.policy(denying("other", "statistics/*"))
	require.NotEmpty(t, m.all(c, "/api/v1/configmaps", "application/json", 0))
	for _, agents := range [][]string{{client}, {"x", "Go-http*"}} {
		m.policy(denying(agents...))
		for form, accept := range forms {
			require.Empty(t, m.all(c, "/api/v1/configmaps", accept[0], 0), form)
			require.Empty(t, m.all(c, "/api/v1/namespaces/ns-1/configmaps", accept[0], 0), form)
			require.Empty(t, m.watched(c, "/api/v1/configmaps?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", accept[1]), form)
		}
	}
}
