package bounds

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
)

func TestObjectsAboveABoundOfTheSchemaAreRejected(t *testing.T) {
	list := func(n int, element string) string {
		return "[" + strings.TrimSuffix(strings.Repeat(element+",", n), ",") + "]"
	}
	var labels []string
	for i := range 65 {
		labels = append(labels, fmt.Sprintf(`"l%d": ""`, i))
	}
	for spec, why := range map[string]string{
		`{"root": {"auto": {"shardingSize": 64}}}`:                                "",
		`{"root": {"auto": {"shardingSize": 65}}}`:                                "spec.root.auto.shardingSize: Invalid value: 65: must be at most 64",
		`{"ROOT": {"Auto": {"ShardingSize": 2147483647}}}`:                        "spec.root.auto.shardingSize",
		`{"controller": {"locks": ` + list(64, "null") + `}}`:                     "",
		`{"controller": {"locks": ` + list(65, "null") + `}}`:                     "spec.controller.locks: Too many: 65: must have at most 64 items",
		`{"limits": [{}, {"relateResources": ` + list(65, "{}") + `}]}`:           "spec.limits[1].relateResources: Too many",
		`{"root": {"prefix": "` + strings.Repeat("ä", 40) + `"}}`:                 "",
		`{"root": {"prefix": "` + strings.Repeat("ä", 41) + `"}}`:                 "spec.root.prefix: Too long",
		`{"selector": {"matchLabels": {` + strings.Join(labels[:64], ",") + `}}}`: "",
		`{"selector": {"matchLabels": {` + strings.Join(labels, ",") + `}}}`:      "spec.selector.matchLabels: Too many",
	} {
		err := Unmarshal("ctrlmesh.kusionstack.io_shardingconfigs", []byte(`{"metadata": {"labels": {"a": "b"}}, "spec": `+spec+"}"), &v1alpha1.ShardingConfig{})
		if why == "" {
			require.NoError(t, err, spec)
		} else {
			require.ErrorContains(t, err, why, spec)
		}
	}
	require.Error(t, Unmarshal("ctrlmesh.kruise.io_virtualapps", []byte(`{"spec": []}`), &kruise.VirtualApp{}))
	require.ErrorContains(t, Unmarshal("others", []byte(`{}`), &kruise.VirtualApp{}), "there is no definition others")
}

// What a review costs is bounded only if every list and map is.
func TestSchemasBoundAllListsAndMaps(t *testing.T) {
	require.Len(t, schemas(), 6)
	var walk func(s *schema, path string)
	walk = func(s *schema, path string) {
		if s == nil {
			return
		}
		assert.False(t, s.Items != nil && s.MaxItems == nil, "list %s has no maxItems", path)
		assert.False(t, s.AdditionalProperties != nil && s.MaxProperties == nil, "map %s has no maxProperties", path)
		walk(s.Items, path+"[]")
		walk(s.AdditionalProperties, path+"{}")
		for name, property := range s.Properties {
			walk(property, path+"."+name)
		}
	}
	for name, s := range schemas() {
		require.NotEmpty(t, s.Properties["spec"].Properties, name)
		walk(s.Properties["spec"], name+" spec")
	}
}
