package fields

// Edit is a body of which parts are replaced, from front to back.
type Edit struct {
	in     []byte
	out    []byte // nil until the first replacement
	copied int    // in[:copied] is in out
}

// NewEdit returns an Edit that replaces nothing yet.
func NewEdit(b []byte) *Edit { return &Edit{in: b} }

// Replace replaces b[from:to].
func (e *Edit) Replace(from, to int, by []byte) {
	if e.out == nil {
		e.out = make([]byte, 0, len(e.in)+len(by))
	}
	e.out = append(append(e.out, e.in[e.copied:from]...), by...)
	e.copied = to
}

// Result returns the body with all replacements, or b itself if there is none.
func (e *Edit) Result() (b []byte, changed bool) {
	if e.out == nil {
		return e.in, false
	}
	return append(e.out, e.in[e.copied:]...), true
}
