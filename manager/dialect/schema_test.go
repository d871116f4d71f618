package dialect

import (
	"context"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdvalidation "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

// crd judges objects as the apiserver does by the schema of their kind.
type crd struct {
	structural *schema.Structural
	schema     validation.SchemaValidator
	cel        *cel.Validator
}

func schemaOf(t testing.TB, name string) *crd {
	t.Helper()
	data, err := os.ReadFile("../../deploy/crd/" + name + ".yaml")
	require.NoError(t, err)
	external := &apiextensionsv1.CustomResourceDefinition{}
	require.NoError(t, yaml.UnmarshalStrict(data, external))
	apiextensionsv1.SetDefaults_CustomResourceDefinition(external)
	apiextensionsv1.SetDefaults_CustomResourceDefinitionSpec(&external.Spec)
	scheme := runtime.NewScheme()
	require.NoError(t, apiextensions.AddToScheme(scheme))
	require.NoError(t, apiextensionsv1.AddToScheme(scheme))
	internal := &apiextensions.CustomResourceDefinition{}
	require.NoError(t, scheme.Convert(external, internal, nil))
	internal.Status.StoredVersions = []string{"v1alpha1"}
	require.Empty(t, crdvalidation.ValidateCustomResourceDefinition(context.Background(), internal), "the apiserver rejects the definition")
	props := internal.Spec.Validation
	if props == nil {
		props = internal.Spec.Versions[0].Schema
	}
	out := &crd{}
	out.structural, err = schema.NewStructural(props.OpenAPIV3Schema)
	require.NoError(t, err)
	out.schema, _, err = validation.NewSchemaValidator(props.OpenAPIV3Schema)
	require.NoError(t, err)
	out.cel = cel.NewValidator(out.structural, true, math.MaxInt64)
	return out
}

// admit returns the errors that the apiserver finds.
func (c *crd) admit(o map[string]any) field.ErrorList {
	defaulting.PruneNonNullableNullsWithoutDefaults(o, c.structural)
	errs := validation.ValidateCustomResource(nil, o, c.schema)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, c.structural, o)...)
	if len(errs) == 0 {
		errs, _ = c.cel.Validate(context.Background(), nil, c.structural, o, nil, math.MaxInt64)
	}
	return errs
}

func TestSchemasRefuseTwoSpellingsOfTheLock(t *testing.T) {
	controller := map[string]any{"leaderElectionName": "a", "leaderElection": map[string]any{"lockName": "b"}}
	selector := map[string]any{"matchLabels": map[string]any{"app": "a"}}
	for name, spec := range map[string]map[string]any{
		"ctrlmesh.kruise.io_virtualapps":        {"selector": selector, "configuration": map[string]any{"controller": controller}},
		"kridge.kusionstack.io_shardingconfigs": {"selector": selector, "controller": controller, "limits": []any{map[string]any{}}},
	} {
		errs := schemaOf(t, name).admit(map[string]any{"spec": spec})
		require.Len(t, errs, 1)
		require.ErrorContains(t, errs[0], "leaderElectionName and leaderElection.lockName both name the lock: set one of them")
	}
}
