// Package bounds decodes objects of the mesh's kinds within the bounds of their schemas. Anybody can
// send objects to the webhooks, so that nothing there may rely on the apiserver's validation.
package bounds

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/deploy/crd"
)

// schema is the part of a schema that bounds the work that an object causes.
type schema struct {
	MaxItems, MaxLength, MaxProperties *int
	Maximum                            *int64
	Items, AdditionalProperties        *schema
	Properties                         map[string]*schema
}

// schemas returns the schemas of all definitions, by their names without the suffix.
var schemas = sync.OnceValue(func() map[string]*schema {
	out := map[string]*schema{}
	entries, err := crd.Files.ReadDir(".")
	if err != nil {
		panic(err) // the files are part of the program
	}
	for _, e := range entries {
		text, err := crd.Files.ReadFile(e.Name())
		if err != nil {
			panic(err)
		}
		var definition struct {
			Spec struct {
				Versions []struct {
					Schema struct{ OpenAPIV3Schema *schema }
				}
			}
		}
		if err := yaml.Unmarshal(text, &definition); err != nil {
			panic(err)
		}
		out[strings.TrimSuffix(e.Name(), ".yaml")] = definition.Spec.Versions[0].Schema.OpenAPIV3Schema
	}
	return out
})

// Unmarshal decodes an object of a definition, such as ctrlmesh.kusionstack.io_circuitbreakers, in
// JSON. It returns an error if the object exceeds a bound of the schema: lengths of lists, maps and
// texts, and maxima of numbers. It checks what was decoded, because the decoder ignores the case of
// names.
func Unmarshal(definition string, raw []byte, o any) error {
	if err := json.Unmarshal(raw, o); err != nil {
		return err
	}
	s, known := schemas()[definition]
	if !known {
		return fmt.Errorf("there is no definition %s", definition)
	}
	if err := s.check(reflect.ValueOf(o), nil); err != nil {
		return err
	}
	return nil
}

// check returns the first excess in a value; nil if there is none.
func (s *schema) check(v reflect.Value, path *field.Path) *field.Error {
	if s == nil {
		return nil
	}
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			return s.check(v.Elem(), path)
		}
	case reflect.Struct:
		return s.checkFields(v, path)
	case reflect.Slice:
		return s.checkItems(v, path)
	case reflect.Map:
		return s.checkMembers(v, path)
	case reflect.String:
		if s.MaxLength != nil && utf8.RuneCountInString(v.String()) > *s.MaxLength {
			return field.TooLong(path, "", *s.MaxLength)
		}
	case reflect.Int, reflect.Int32, reflect.Int64:
		if s.Maximum != nil && v.Int() > *s.Maximum {
			return field.Invalid(path, v.Int(), fmt.Sprintf("must be at most %d", *s.Maximum))
		}
	default: // no bound applies
	}
	return nil
}

func (s *schema) checkItems(v reflect.Value, path *field.Path) *field.Error {
	if exceeds(v.Len(), s.MaxItems) {
		return field.TooMany(path, v.Len(), *s.MaxItems)
	}
	for i := range v.Len() {
		if err := s.Items.check(v.Index(i), path.Index(i)); err != nil {
			return err
		}
	}
	return nil
}

func (s *schema) checkMembers(v reflect.Value, path *field.Path) *field.Error {
	if exceeds(v.Len(), s.MaxProperties) {
		return field.TooMany(path, v.Len(), *s.MaxProperties)
	}
	for key, value := range v.Seq2() {
		if err := s.AdditionalProperties.check(value, path.Key(key.String())); err != nil {
			return err
		}
	}
	return nil
}

func (s *schema) checkFields(v reflect.Value, path *field.Path) *field.Error {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if !f.IsExported() {
			continue
		}
		of, at := s, path // an embedded struct has the same schema
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" {
			of, at = s.Properties[name], path.Child(name)
		}
		if err := of.check(v.Field(i), at); err != nil {
			return err
		}
	}
	return nil
}

func exceeds(n int, bound *int) bool { return bound != nil && n > *bound }
