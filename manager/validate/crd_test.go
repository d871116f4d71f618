package validate

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
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
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

func newCRD(t testing.TB, plural string) *crd {
	t.Helper()
	data, err := os.ReadFile("../../deploy/crd/ctrlmesh.kusionstack.io_" + plural + ".yaml")
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
	require.Empty(t, crdvalidation.ValidateCustomResourceDefinition(context.Background(), internal), "the apiserver takes it")

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

// admit fills in defaults, and finds what the apiserver would.
func (c *crd) admit(o map[string]any) field.ErrorList {
	pruning.Prune(o, c.structural, true)
	defaulting.Default(o, c.structural)
	errs := validation.ValidateCustomResource(nil, o, c.schema)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, c.structural, o)...)
	if len(errs) > 0 {
		return errs
	}
	errs, _ = c.cel.Validate(context.Background(), nil, c.structural, o, nil, math.MaxInt64)
	return errs
}

func TestCRDs(t *testing.T) {
	for _, plural := range []string{"circuitbreakers", "faultinjections", "shardingconfigs"} {
		newCRD(t, plural)
	}
}
