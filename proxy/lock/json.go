package lock

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/fields"
)

var errJSON = errors.New("the body is not valid JSON")

// shape describes where in a JSON value names are. Everything else is skipped.
type shape struct {
	fields  map[string]*shape
	element *shape
	// text is called with each decoded string at this place. If it returns true, the
	// returned string replaces it.
	text func(string) (string, bool)
}

// object returns the shape of an object's own name. selfLink of old servers ends in it.
func (n names) object() *shape {
	return &shape{fields: map[string]*shape{
		"metadata": {fields: map[string]*shape{
			"name":     {text: n.swap},
			"selfLink": {text: n.swapLink},
		}},
	}}
}

func (n names) swapLink(s string) (string, bool) {
	if rest, ok := strings.CutSuffix(s, "/"+n.from); ok {
		return rest + "/" + n.to, true
	}
	return s, false
}

// answer returns the shape of an answer of the apiserver: an object, a list, a Table or a
// Status. Only a Status, recognised by its kind, has a message and details with names.
func (n names) answer(kind string) *shape {
	s := n.object()
	item := n.object()
	s.fields["items"] = &shape{element: item}
	s.fields["rows"] = &shape{element: &shape{fields: map[string]*shape{
		"object": item,
		"cells":  {element: &shape{text: n.swap}},
	}}}
	if kind == "Status" {
		s.fields["message"] = &shape{text: n.swapQuoted}
		s.fields["details"] = &shape{fields: map[string]*shape{"name": {text: n.swap}}}
	}
	return s
}

// swapQuoted swaps the name where a message quotes it.
func (n names) swapQuoted(s string) (string, bool) {
	out := strings.ReplaceAll(s, `"`+n.from+`"`, `"`+n.to+`"`)
	return out, out != s
}

// editJSON returns b with every name of the shape swapped, or b itself if there is none.
func editJSON(b []byte, s *shape) ([]byte, bool, error) {
	if !json.Valid(b) {
		return nil, false, errJSON
	}
	edit := fields.NewEdit(b)
	s.edit(b, 0, edit)
	out, changed := edit.Result()
	return out, changed, nil
}

// edit swaps the names in a valid value of the shape, which is at a place in the body.
func (s *shape) edit(value []byte, at int, out *fields.Edit) {
	if s.text != nil && value[0] == '"' {
		var is string
		_ = json.Unmarshal(value, &is) // it is valid
		if text, edit := s.text(is); edit {
			quoted, _ := json.Marshal(text) // a string always encodes
			out.Replace(at, at+len(value), quoted)
		}
		return
	}
	fields.Members(value, func(m fields.Member) {
		if member := s.fields[string(m.Key)]; member != nil {
			member.edit(m.Value, at+m.From, out)
		}
	})
	if s.element == nil {
		return
	}
	_, _ = fields.Elements(value, func(element []byte, from, _ int) error {
		s.element.edit(element, at+from, out)
		return nil
	})
}

// kindOf returns the top-level kind of valid JSON. As in all JSON readers of Kubernetes,
// the last one counts.
func kindOf(b []byte) string {
	var kind string
	_, _, _ = editJSON(b, &shape{fields: map[string]*shape{"kind": {text: note(&kind)}}})
	return kind
}

// note returns a function that stores a text and does not change it.
func note(to *string) func(string) (string, bool) {
	return func(s string) (string, bool) {
		*to = s
		return s, false
	}
}

// maxOperations bounds the operations of a JSON patch, as the apiserver does.
const maxOperations = 10000

// operation is an operation of a JSON patch.
type operation struct {
	Op, Path, From string
	Value          []byte // in JSON
	raw            []byte
	start          int // of raw in the patch
}

// read reads the members. It fails if one is of another type, which the apiserver refuses.
func (o *operation) read() (err error) {
	fields.Members(o.raw, func(m fields.Member) {
		var to *string
		switch string(m.Key) {
		case "op":
			to = &o.Op
		case "path":
			to = &o.Path
		case "from":
			to = &o.From
		case "value":
			o.Value = m.Value
			return
		default:
			return
		}
		*to = ""
		err = cmp.Or(err, json.Unmarshal(m.Value, to))
	})
	return err
}

// operations calls f with each operation of a JSON patch, until f fails.
func operations(b []byte, f func(operation) error) error {
	if !json.Valid(b) {
		return errJSON
	}
	n := 0
	array, err := fields.Elements(b, func(raw []byte, start, _ int) error {
		if n++; n > maxOperations {
			return fmt.Errorf("the JSON patch has more than %d operations", maxOperations)
		}
		op := operation{raw: raw, start: start}
		if op.read() != nil || op.Op == "" {
			return nil
		}
		return f(op)
	})
	if !array && string(bytes.TrimSpace(b)) != "null" { // an empty patch
		return errJSON
	}
	return err
}

// jsonPatch swaps names in the operations of a JSON patch that set or test the name of the
// object.
func (n names) jsonPatch(b []byte) ([]byte, bool, error) {
	object := n.object()
	values := map[string]*shape{"": object, "/metadata": object.fields["metadata"], "/metadata/name": {text: n.swap}}
	patch := fields.NewEdit(b)
	err := operations(b, func(op operation) error {
		if value := values[op.Path]; value != nil {
			(&shape{fields: map[string]*shape{"value": value}}).edit(op.raw, op.start, patch)
		}
		return nil
	})
	if err != nil {
		return nil, false, err
	}
	out, changed := patch.Result()
	return out, changed, nil
}
