package fields

import (
	"bytes"
	"encoding/json"
)

// Member is a member of a JSON object.
type Member struct {
	Key []byte
	// Value is the encoded value.
	Value []byte
	// From and To are where the value is in the object.
	From, To int
}

// Members calls yield with each member of an object, and returns their number. It reports
// false if b, which must be valid JSON, is another value.
func Members(b []byte, yield func(m Member)) (n int, ok bool) {
	i := spaces(b, 0)
	if b[i] != '{' {
		return 0, false
	}
	for i++; ; n++ {
		if i = spaces(b, i); b[i] == ',' {
			i = spaces(b, i+1)
		}
		if b[i] == '}' {
			return n, true
		}
		end := skip(b, i)
		m := Member{Key: unquote(b[i:end])}
		m.From = spaces(b, spaces(b, end)+1) // behind the colon
		m.To = skip(b, m.From)
		m.Value = b[m.From:m.To]
		yield(m)
		i = m.To
	}
}

// Elements calls yield with each element of a JSON array and with where it is, until yield
// fails. It reports false if b, which must be valid JSON, is another value.
func Elements(b []byte, yield func(value []byte, from, to int) error) (ok bool, err error) {
	i := spaces(b, 0)
	if b[i] != '[' {
		return false, nil
	}
	for i++; ; {
		if i = spaces(b, i); b[i] == ',' {
			i = spaces(b, i+1)
		}
		if b[i] == ']' {
			return true, nil
		}
		from := i
		i = skip(b, i)
		if err := yield(b[from:i], from, i); err != nil {
			return true, err
		}
	}
}

// spaces returns where the next token begins.
func spaces(b []byte, i int) int {
	for b[i] == ' ' || b[i] == '\t' || b[i] == '\n' || b[i] == '\r' {
		i++
	}
	return i
}

// skip returns where the value at i ends.
func skip(b []byte, i int) int {
	switch b[i] {
	case '"':
		for i++; b[i] != '"'; i++ {
			if b[i] == '\\' {
				i++
			}
		}
		return i + 1
	case '{', '[':
		for depth := 0; ; {
			switch b[i] {
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			case '"':
				i = skip(b, i)
				continue
			}
			i++
		}
	}
	if n := bytes.IndexAny(b[i:], " \t\n\r,]}"); n >= 0 {
		return i + n
	}
	return len(b)
}

// unquote decodes a string that is valid UTF-8.
func unquote(quoted []byte) []byte {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted[1 : len(quoted)-1]
	}
	var s string
	_ = json.Unmarshal(quoted, &s) // it is valid
	return []byte(s)
}
