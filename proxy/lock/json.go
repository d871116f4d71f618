package lock

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	kjson "sigs.k8s.io/json"
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
	e := newEditor(b)
	e.value(s)
	return e.result()
}

// editor walks over valid JSON, so it does not check for errors.
type editor struct {
	*json.Decoder
	in     []byte
	out    []byte // nil until the first edit
	copied int    // in[:copied] is in out
}

func newEditor(b []byte) *editor { return &editor{Decoder: json.NewDecoder(bytes.NewReader(b)), in: b} }

func (e *editor) replace(from, to int, by []byte) {
	e.out = append(append(e.out, e.in[e.copied:from]...), by...)
	e.copied = to
}

func (e *editor) result() ([]byte, bool, error) {
	if e.out == nil {
		return e.in, false, nil
	}
	return append(e.out, e.in[e.copied:]...), true, nil
}

// value walks over one value of the shape, and skips it if the shape is nil.
func (e *editor) value(s *shape) {
	if s == nil {
		_ = e.Decode(&json.RawMessage{})
		return
	}
	before := int(e.InputOffset())
	switch token, _ := e.Token(); token := token.(type) {
	case json.Delim:
		e.elements(token, func(key string) *shape {
			if token == '{' {
				return s.fields[key]
			}
			return s.element
		})
	case string:
		if s.text == nil {
			return
		}
		if text, edit := s.text(token); edit {
			start := before + bytes.IndexByte(e.in[before:], '"')
			quoted, _ := json.Marshal(text) // a string always encodes
			e.replace(start, int(e.InputOffset()), quoted)
		}
	}
}

// elements walks over the rest of an object or array; key is "" in an array.
func (e *editor) elements(begin json.Delim, of func(key string) *shape) {
	for e.More() {
		key := ""
		if begin == '{' {
			token, _ := e.Token()
			key, _ = token.(string)
		}
		e.value(of(key))
	}
	_, _ = e.Token()
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

// operations calls f with each operation of a JSON patch, and with the offset at which it
// ends, until f fails. The operation is valid until f returns.
func operations(b []byte, f func(op json.RawMessage, end int) error) error {
	if !json.Valid(b) {
		return errJSON
	}
	d := json.NewDecoder(bytes.NewReader(b))
	switch begin, _ := d.Token(); begin {
	case json.Delim('['):
	case nil: // null is an empty patch
		return nil
	default:
		return errJSON
	}
	var op json.RawMessage
	for n := 0; d.More(); n++ {
		if n == maxOperations {
			return fmt.Errorf("the JSON patch has more than %d operations", maxOperations)
		}
		_ = d.Decode(&op)
		if err := f(op, int(d.InputOffset())); err != nil {
			return err
		}
	}
	return nil
}

// jsonPatch swaps names in the operations of a JSON patch that set or test the name of the
// object.
func (n names) jsonPatch(b []byte) ([]byte, bool, error) {
	object := n.object()
	values := map[string]*shape{"": object, "/metadata": object.fields["metadata"], "/metadata/name": {text: n.swap}}
	e := &editor{in: b}
	err := operations(b, func(raw json.RawMessage, end int) error {
		var op struct { // the path may come after the value
			Path string `json:"path"`
		}
		if kjson.UnmarshalCaseSensitivePreserveInts(raw, &op) != nil {
			return nil // the apiserver refuses it
		}
		value := values[op.Path]
		if value == nil {
			return nil
		}
		edited, changed, err := editJSON(raw, &shape{fields: map[string]*shape{"value": value}})
		if changed {
			e.replace(end-len(raw), end, edited)
		}
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return e.result()
}
