// Package crdtest checks objects by the schemas of deploy/crd, as the apiserver does.
package crdtest

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdvalidation "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/internal/crdschema"
)

// CRD validates objects as the apiserver does by the schema of their kind.
type CRD struct{ *crdschema.Schema }

// Load reads a definition of deploy/crd, such as ctrlmesh.kusionstack.io_circuitbreakers. It
// requires that the apiserver accepts the definition.
func Load(t testing.TB, name string) *CRD {
	t.Helper()
	external, err := crdschema.Definition(name)
	require.NoError(t, err)
	apiextensionsv1.SetDefaults_CustomResourceDefinition(external)
	apiextensionsv1.SetDefaults_CustomResourceDefinitionSpec(&external.Spec)
	scheme := runtime.NewScheme()
	require.NoError(t, apiextensions.AddToScheme(scheme))
	require.NoError(t, apiextensionsv1.AddToScheme(scheme))
	internal := &apiextensions.CustomResourceDefinition{}
	require.NoError(t, scheme.Convert(external, internal, nil))
	internal.Status.StoredVersions = []string{"v1alpha1"}
	require.Empty(t, crdvalidation.ValidateCustomResourceDefinition(context.Background(), internal), "the apiserver rejects the definition")
	schema, err := crdschema.Load(name)
	require.NoError(t, err)
	return &CRD{schema}
}

// Update returns the errors of the rules of CEL, which compare an object with the earlier one.
func (c *CRD) Update(old, o map[string]any) field.ErrorList {
	errs, _ := cel.NewValidator(c.Structural, true, math.MaxInt64).Validate(context.Background(), nil, c.Structural, o, old, math.MaxInt64)
	return errs
}
