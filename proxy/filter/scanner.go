package filter

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
)

// scanner walks over JSON at the front of an input, reading on where it must. What
// it only passes over it does not check: a reader that does cannot take it for
// something else, for then it would not take it at all.
//
// The first error stays, and everything returns at once after it.
type scanner struct {
	in  *input
	i   int // in.b[:i] was walked over
	err error
}

// span is a place in in.b. A key that occurs twice has no meaning that all readers
// agree on, so each span is set once.
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

// peek is the next byte that is no space.
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

// spaces is how many of them b begins with.
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

// another walks over what follows an element: false after the last.
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

// closeQuote walks to behind the quote that ends a string.
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

// text decodes the string at v; it allocates only where v is not plain ASCII.
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

// key walks over the key of a member and the colon. It is valid until the walk
// goes on.
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

// null walks over it.
func (s *scanner) null() {
	s.peek()
	from := s.i
	s.skip()
	if s.err == nil && string(s.in.b[from:s.i]) != "null" {
		s.fail()
	}
}

// stringOrNull walks over what must be either, and notes where the string is.
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
	after // what ends a number or a literal, as end does
)

var class = [256]byte{
	'"': quote, '{': begin, '[': begin, '}': end, ']': end,
	',': after, ':': after, ' ': after, '\t': after, '\n': after, '\r': after,
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
				n := bytes.IndexByte(b[i+1:], '"')
				if n < 0 || n > 0 && b[i+n] == '\\' {
					break scan
				}
				if i += n + 1; depth > 0 {
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
			// Behind a number or a literal.
			if s.i = i; i == start {
				s.fail()
			}
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
