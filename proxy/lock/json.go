package lock

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
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

// editJSON returns b with every name of the shape swapped, or b itself if there is none. b
// must be valid JSON.
func editJSON(b []byte, s *shape) ([]byte, bool, error) {
	if !json.Valid(b) {
		return nil, false, errJSON
	}
	e := editor{in: b}
	e.value(s)
	if e.out == nil {
		return b, false, nil
	}
	return append(e.out, b[e.copied:]...), true, nil
}

// editor walks over valid JSON, so it does not check for errors.
type editor struct {
	in     []byte
	pos    int
	out    []byte // nil until the first edit
	copied int    // in[:copied] is in out
}

func (e *editor) space() {
	for e.pos < len(e.in) {
		switch e.in[e.pos] {
		case ' ', '\t', '\n', '\r':
			e.pos++
		default:
			return
		}
	}
}

// value walks over one value of the shape, and skips it if the shape is nil.
func (e *editor) value(s *shape) {
	e.space()
	switch c := e.in[e.pos]; {
	case s == nil:
		e.skip()
	case c == '{' && s.fields != nil:
		e.sequence('}', func() {
			key := e.string()
			e.space()
			e.pos++ // the colon
			e.value(s.fields[key])
		})
	case c == '[' && s.element != nil:
		e.sequence(']', func() { e.value(s.element) })
	case c == '"' && s.text != nil:
		start := e.pos
		if text, edit := s.text(e.string()); edit {
			quoted, _ := json.Marshal(text) // a string always encodes
			e.out = append(append(e.out, e.in[e.copied:start]...), quoted...)
			e.copied = e.pos
		}
	default:
		e.skip()
	}
}

// sequence calls one for each element of the object or array at pos.
func (e *editor) sequence(end byte, one func()) {
	e.pos++
	for {
		e.space()
		if e.in[e.pos] == end {
			e.pos++
			return
		}
		if e.in[e.pos] == ',' {
			e.pos++
			e.space()
		}
		one()
	}
}

// string consumes the string at pos and decodes it.
func (e *editor) string() string {
	start := e.pos
	e.skipString()
	raw := e.in[start:e.pos]
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1])
	}
	var s string
	_ = json.Unmarshal(raw, &s)
	return s
}

func (e *editor) skipString() {
	for e.pos++; e.in[e.pos] != '"'; e.pos++ {
		if e.in[e.pos] == '\\' {
			e.pos++
		}
	}
	e.pos++
}

// skip consumes one value of any kind.
func (e *editor) skip() {
	depth := 0
	for e.pos < len(e.in) {
		switch e.in[e.pos] {
		case '"':
			e.skipString()
			if depth == 0 {
				return
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return // the end of the object or array around a number or a literal
			}
			if depth--; depth == 0 {
				e.pos++
				return
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return
			}
		}
		e.pos++
	}
}

// kindOf returns the top-level kind of valid JSON. As in all JSON readers of Kubernetes,
// the last one counts.
func kindOf(b []byte) string {
	var kind string
	_, _, _ = editJSON(b, &shape{fields: map[string]*shape{
		"kind": {text: func(s string) (string, bool) { kind = s; return s, false }},
	}})
	return kind
}

// jsonPatch swaps names in the operations of a JSON patch that set or test the name of the
// object.
func (n names) jsonPatch(b []byte) ([]byte, bool, error) {
	var ops []json.RawMessage
	if err := json.Unmarshal(b, &ops); err != nil {
		return nil, false, errJSON
	}
	if len(ops) == 0 { // null is an empty patch too
		return b, false, nil
	}
	// The shape of an operation's value depends on its path, which may come after the
	// value. So read the paths first, then walk with one shape per operation.
	values := make([]*shape, len(ops))
	for i, op := range ops {
		var path string
		_, _, _ = editJSON(op, &shape{fields: map[string]*shape{
			"path": {text: func(s string) (string, bool) { path = s; return s, false }},
		}})
		switch path {
		case "":
			values[i] = n.object()
		case "/metadata":
			values[i] = n.object().fields["metadata"]
		case "/metadata/name":
			values[i] = &shape{text: n.swap}
		}
	}
	e := editor{in: b}
	e.space()
	i := 0
	e.sequence(']', func() {
		e.value(&shape{fields: map[string]*shape{"value": values[i]}})
		i++
	})
	if e.out == nil {
		return b, false, nil
	}
	return append(e.out, b[e.copied:]...), true, nil
}
