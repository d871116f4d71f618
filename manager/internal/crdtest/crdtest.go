// Package crdtest checks objects by the schemas of deploy/crd, as the apiserver does.
package crdtest

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
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

// CRD judges objects as the apiserver does by the schema of their kind.
type CRD struct {
	Structural *schema.Structural
	schema     validation.SchemaValidator
	cel        *cel.Validator
}

// Load reads a definition of deploy/crd, such as ctrlmesh.kusionstack.io_circuitbreakers. The
// calling test is two directories below the root of the tree.
func Load(t testing.TB, name string) *CRD {
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
	out := &CRD{}
	out.Structural, err = schema.NewStructural(props.OpenAPIV3Schema)
	require.NoError(t, err)
	out.schema, _, err = validation.NewSchemaValidator(props.OpenAPIV3Schema)
	require.NoError(t, err)
	out.cel = cel.NewValidator(out.Structural, true, math.MaxInt64)
	return out
}

// Validate returns the errors of an object that was pruned and has its defaults.
func (c *CRD) Validate(o map[string]any) field.ErrorList {
	errs := validation.ValidateCustomResource(nil, o, c.schema)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, c.Structural, o)...)
	if len(errs) == 0 {
		errs, _ = c.cel.Validate(context.Background(), nil, c.Structural, o, nil, math.MaxInt64)
	}
	return errs
}
