package repo

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

// kubectl explain shows the descriptions of fields.
func TestCRDFieldsHaveDescriptions(t *testing.T) {
	files, err := filepath.Glob("../../deploy/crd/*_*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		var crd apiextensionsv1.CustomResourceDefinition
		require.NoError(t, yaml.Unmarshal(b, &crd))
		for _, v := range crd.Spec.Versions {
			for _, name := range []string{"spec", "status"} {
				described(t, crd.Spec.Names.Kind+"."+name, v.Schema.OpenAPIV3Schema.Properties[name])
			}
		}
	}
}

// described asserts that a field and those within it have a description.
func described(t *testing.T, path string, field apiextensionsv1.JSONSchemaProps) {
	assert.NotEmpty(t, field.Description, "%s: comment the field in api/ctrlmesh/v1alpha1, and run make generate", path)
	for name, within := range field.Properties {
		described(t, path+"."+name, within)
	}
	if field.Items == nil || field.Items.Schema == nil {
		return
	}
	for name, within := range field.Items.Schema.Properties {
		described(t, path+"[]."+name, within)
	}
}
