package node

import (
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// makeValid replaces what is not UTF-8 in the texts of a report. Pods write some of them, such as the holder of a
// lock. The stream to the manager, which has the reports of all pods, ends at a text that is not UTF-8.
func makeValid(r *meshv1.PodReport) {
	_ = protorange.Range(r.ProtoReflect(), func(at protopath.Values) error {
		in, here := at.Index(-2).Value, at.Index(-1)
		if m, ok := here.Value.Interface().(protoreflect.Map); ok {
			makeKeysValid(m)
			return nil
		}
		text, ok := here.Value.Interface().(string)
		if !ok || utf8.ValidString(text) {
			return nil
		}
		valid := protoreflect.ValueOfString(strings.ToValidUTF8(text, "?"))
		switch here.Step.Kind() {
		case protopath.FieldAccessStep:
			in.Message().Set(here.Step.FieldDescriptor(), valid)
		case protopath.ListIndexStep:
			in.List().Set(here.Step.ListIndex(), valid)
		case protopath.MapIndexStep:
			in.Map().Set(here.Step.MapIndex(), valid)
		}
		return nil
	})
}

func makeKeysValid(m protoreflect.Map) {
	var invalid []protoreflect.MapKey
	m.Range(func(key protoreflect.MapKey, _ protoreflect.Value) bool {
		if text, ok := key.Interface().(string); ok && !utf8.ValidString(text) {
			invalid = append(invalid, key)
		}
		return true
	})
	for _, key := range invalid {
		value := m.Get(key)
		m.Clear(key)
		m.Set(protoreflect.ValueOfString(strings.ToValidUTF8(key.String(), "?")).MapKey(), value)
	}
}
