package filter

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
)

// scanner walks over JSON at the start of an input, and reads more where it must. It does
// not validate what it skips: a stricter reader rejects invalid JSON, and so cannot take
// it for another object.
//
// The first error stays in err. After it, all methods return at once.
type scanner struct {
	in  *input
	i   int // in.b[:i] was scanned
	err error
}

// span is a place in in.b. Each span may be set only once, because readers disagree about
// the meaning of a key that occurs twice.
type span struct {
	from, to int
	set      bool
}

func (s *scanner) fail() {
	if s.err == nil {
		s.err = ErrForm
	}
}

// once fails if the span was set before.
func (s *scanner) once(v *span) {
	if v.set {
		s.fail()
	}
	v.set = true
}

func (s *scanner) more() bool {
	if s.err == nil {
		s.err = s.in.more()
	}
	if errors.Is(s.err, io.EOF) {
		s.err = io.ErrUnexpectedEOF
	}
	return s.err == nil
}

// peek skips spaces and returns the byte after them.
func (s *scanner) peek() byte {
	for s.err == nil {
		s.i += spaces(s.in.b[s.i:])
		if s.i < len(s.in.b) {
			return s.in.b[s.i]
		}
		s.more()
	}
	return 0
}

// spaces returns the number of spaces at the start of b.
func spaces(b []byte) int {
	for i, c := range b {
		switch c {
		case ' ', '\t', '\n', '\r':
		default:
			return i
		}
	}
	return len(b)
}

func (s *scanner) expect(c byte) {
	if s.peek() != c {
		s.fail()
		return
	}
	s.i++
}

// another walks over what follows an element. It returns false after the last one.
func (s *scanner) another(end byte) bool {
	switch s.peek() {
	case ',':
		s.i++
		return s.err == nil
	case end:
		s.i++
	default:
		s.fail()
	}
	return false
}

// quoted walks over a string and returns what is between its quotes.
func (s *scanner) quoted() (from, to int) {
	s.expect('"')
	from = s.i
	s.closeQuote()
	return from, s.i - 1
}

// closeQuote walks past the quote that ends a string.
func (s *scanner) closeQuote() {
	from := s.i
	for s.err == nil {
		n := bytes.IndexByte(s.in.b[s.i:], '"')
		if n < 0 {
			s.i = len(s.in.b)
			s.more()
			continue
		}
		slashes := n + s.i
		for slashes > from && s.in.b[slashes-1] == '\\' {
			slashes--
		}
		escaped := (s.i+n-slashes)%2 == 1
		if s.i += n + 1; !escaped {
			return
		}
	}
}

// text decodes the string at v. It allocates only if v is not plain ASCII.
func (s *scanner) text(v span) []byte {
	if s.err != nil {
		return nil
	}
	raw := s.in.b[v.from:v.to]
	for _, c := range raw {
		if c < ' ' || c >= 0x80 || c == '\\' {
			var decoded string
			if json.Unmarshal(s.in.b[v.from-1:v.to+1], &decoded) != nil {
				s.fail()
			}
			return []byte(decoded)
		}
	}
	return raw
}

// key walks over the key of a member and the colon, and returns the key. The key is valid
// until the next call.
func (s *scanner) key() []byte {
	var v span
	v.from, v.to = s.quoted()
	s.expect(':')
	s.peek()
	return s.text(v)
}

// members calls f with the key of each member of an object, before its value, which
// f walks over.
func (s *scanner) members(f func(key []byte)) {
	s.expect('{')
	if s.peek() == '}' {
		s.i++
		return
	}
	for s.err == nil {
		f(s.key())
		if !s.another('}') {
			return
		}
	}
}

// null walks over a null.
func (s *scanner) null() {
	s.peek()
	from := s.i
	s.skip()
	if s.err == nil && string(s.in.b[from:s.i]) != "null" {
		s.fail()
	}
}

// stringOrNull walks over a string or null, and sets v to the place of the string.
func (s *scanner) stringOrNull(v *span) {
	s.once(v)
	if s.peek() == 'n' {
		s.null()
		return
	}
	v.from, v.to = s.quoted()
}

// classes of bytes, for skip.
const (
	other = iota
	quote
	begin
	end
	after // ends a number or a literal, as end does
)

var class = [256]byte{
	'"': quote, '{': begin, '[': begin, '}': end, ']': end,
	',': after, ':': after, ' ': after, '\t': after, '\n': after, '\r': after,
}

// closing returns the place of the quote that ends the string at b[i]. It returns -1 if that
// is not in b, or may be escaped.
func closing(b []byte, i int) int {
	n := bytes.IndexByte(b[i+1:], '"')
	if n < 0 || n > 0 && b[i+n] == '\\' {
		return -1
	}
	return i + n + 1
}

// literal walks over a number or a literal, which must not be empty.
func (s *scanner) literal(from, to int) {
	if s.i = to; from == to {
		s.fail()
	}
}

// skip walks over one value.
func (s *scanner) skip() {
	s.peek()
	start, depth := s.i, 0
	for s.err == nil {
		b, i := s.in.b, s.i
	scan:
		for ; i < len(b); i++ {
			switch class[b[i]] {
			case other:
				continue
			case quote:
				n := closing(b, i)
				if n < 0 {
					break scan
				}
				if i = n; depth > 0 {
					continue
				}
				s.i = i + 1
				return
			case begin:
				depth++
				continue
			case after:
				if depth > 0 {
					continue
				}
			case end:
				if depth > 1 {
					depth--
					continue
				}
				if depth == 1 {
					s.i = i + 1
					return
				}
			}
			s.literal(start, i)
			return
		}
		if s.i = i; i == len(b) {
			s.more()
			continue
		}
		s.i++
		if s.closeQuote(); depth == 0 {
			return
		}
	}
}
