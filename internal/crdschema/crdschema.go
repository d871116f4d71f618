// Package crdschema checks objects by the schemas of deploy/crd, as the apiserver does.
package crdschema

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/deploy/crd"
)

// Schema validates objects as the apiserver does by the schema of their kind.
type Schema struct {
	Structural *schema.Structural
	validator  validation.SchemaValidator
	cel        *cel.Validator
}

// definitions are the definitions that were parsed, by name: to parse one takes milliseconds.
var definitions sync.Map

// Definition returns a definition of deploy/crd, such as ctrlmesh.kusionstack.io_circuitbreakers. The
// caller may change it.
func Definition(name string) (*apiextensionsv1.CustomResourceDefinition, error) {
	if known, ok := definitions.Load(name); ok {
		if d, ok := known.(*apiextensionsv1.CustomResourceDefinition); ok {
			return d.DeepCopy(), nil
		}
	}
	text, err := crd.Files.ReadFile(name + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("reading the definition %s: %w", name, err)
	}
	out := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.UnmarshalStrict(text, out); err != nil {
		return nil, fmt.Errorf("parsing the definition %s: %w", name, err)
	}
	definitions.Store(name, out.DeepCopy())
	return out, nil
}

// Names returns the names of the definitions, sorted.
func Names() (out []string) {
	files, err := crd.Files.ReadDir(".")
	if err != nil {
		panic(err) // they are part of the program
	}
	for _, f := range files {
		out = append(out, strings.TrimSuffix(f.Name(), ".yaml"))
	}
	return out
}

// Load returns the schema of a definition, of its only version.
func Load(name string) (*Schema, error) {
	definition, err := Definition(name)
	if err != nil {
		return nil, err
	}
	props := &apiextensions.JSONSchemaProps{}
	err = apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(definition.Spec.Versions[0].Schema.OpenAPIV3Schema, props, nil)
	if err != nil {
		return nil, fmt.Errorf("converting the schema of %s: %w", name, err)
	}
	out := &Schema{}
	if out.Structural, err = schema.NewStructural(props); err != nil {
		return nil, fmt.Errorf("reading the schema of %s: %w", name, err)
	}
	if out.validator, _, err = validation.NewSchemaValidator(props); err != nil {
		return nil, fmt.Errorf("compiling the schema of %s: %w", name, err)
	}
	out.cel = cel.NewValidator(out.Structural, true, math.MaxInt64)
	return out, nil
}

// Validate returns the errors of an object that was pruned and has its defaults.
func (s *Schema) Validate(o map[string]any) field.ErrorList {
	errs := validation.ValidateCustomResource(nil, o, s.validator)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, s.Structural, o)...)
	if len(errs) == 0 {
		errs, _ = s.cel.Validate(context.Background(), nil, s.Structural, o, nil, math.MaxInt64)
	}
	return errs
}

// Admit removes the fields that the schema does not have from an object, sets its defaults, and
// returns its errors. unknown are the paths of the removed fields, which kubectl reports.
func (s *Schema) Admit(o map[string]any) (unknown []string, errs field.ErrorList) {
	unknown = pruning.PruneWithOptions(o, s.Structural, true, schema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true})
	defaulting.PruneNonNullableNullsWithoutDefaults(o, s.Structural)
	defaulting.Default(o, s.Structural)
	return unknown, s.Validate(o)
}
