package isolation

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

func TestFilteringAnObjectAllocatesNothing(t *testing.T) {
	pods := []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"pods"}}}
	d, err := Compile(&meshv1.Sharding{
		Limits: []*meshv1.Limit{{Resources: pods, Scope: sharding.Keys("mine").Proto()}},
		Shared: []*meshv1.SharedObjects{{Resources: pods, Namespaces: []string{"shared"}, Names: []string{"one"}}},
	}, "ns")
	require.NoError(t, err)
	n := d.Narrowing(schema.GroupResource{Resource: "pods"})
	key := func(namespace, name string) filter.Key {
		return filter.Key{Namespace: []byte(namespace), Name: []byte(name)}
	}
	for key, want := range map[*filter.Key]bool{
		new(key("mine", "a")): true, new(key("shared", "one")): true, new(key("shared", "two")): false, new(key("", "a")): true,
	} {
		require.Equal(t, want, n.Owns(*key), "%s/%s", key.Namespace, key.Name)
		require.Zero(t, testing.AllocsPerRun(100, func() { n.Owns(*key) }))
	}
}
