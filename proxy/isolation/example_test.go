package isolation_test

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// A shard owns the ConfigMaps of team-a. It may read those of others one by one.
func ExampleCompile() {
	division, err := isolation.Compile(&meshv1.Sharding{
		Shard: "one", ReadAll: true,
		Limits: []*meshv1.Limit{{
			Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"configmaps"}}},
			Scope:     sharding.Keys("team-a").Proto(),
		}},
	}, "operators")
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, request := range []match.Kind{
		{Verb: "get", Resource: "configmaps"},
		{Verb: "update", Resource: "configmaps"},
		{Verb: "update", Resource: "secrets"},
	} {
		for _, namespace := range []string{"team-a", "team-b"} {
			fmt.Println(request.Verb, request.Resource, "in", namespace, "is refused:", division.Refuses(request, namespace, "name"))
		}
	}
	owned, filters := division.Filters(schema.GroupResource{Resource: "configmaps"})
	fmt.Println("lists show only what the shard owns:", filters, owned.Owns("team-a"), owned.Owns("team-b"))
	// Output:
	// get configmaps in team-a is refused: false
	// get configmaps in team-b is refused: false
	// update configmaps in team-a is refused: false
	// update configmaps in team-b is refused: true
	// update secrets in team-a is refused: false
	// update secrets in team-b is refused: false
	// lists show only what the shard owns: true true false
}
