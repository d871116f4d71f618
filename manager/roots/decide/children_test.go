package decide

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// The API server fills in defaults. If a child lacked a field with one, each round would
// write it again.
func TestChildHasAllDefaults(t *testing.T) {
	t.Parallel()
	root := withDefaults(t, rootOf(1))
	want := Child(root, "op-1-normal")
	require.Equal(t, want.Spec, withDefaults(t, want).Spec)
}

// withDefaults returns an object as the API server stores it.
func withDefaults(t *testing.T, c *v1alpha1.ShardingConfig) *v1alpha1.ShardingConfig {
	t.Helper()
	data, err := os.ReadFile("../../../deploy/crd/ctrlmesh.kusionstack.io_shardingconfigs.yaml")
	require.NoError(t, err)
	crd := &apiextensionsv1.CustomResourceDefinition{}
	require.NoError(t, yaml.UnmarshalStrict(data, crd))
	props := &apiextensions.JSONSchemaProps{}
	require.NoError(t, apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(crd.Spec.Versions[0].Schema.OpenAPIV3Schema, props, nil))
	structural, err := schema.NewStructural(props)
	require.NoError(t, err)
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(c)
	require.NoError(t, err)
	defaulting.Default(object, structural)
	out := &v1alpha1.ShardingConfig{}
	require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(object, out))
	return out
}
