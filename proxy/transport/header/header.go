// Package header has the fields of heads of HTTP, in a form that both transports read and write without maps.
package header

import (
	"net/http"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/ctrlmesh/ctrlmesh/internal/listen"
)

// Field is a field of a head. Its name is canonical, see net/textproto.CanonicalMIMEHeaderKey.
type Field struct{ Name, Value string }

// Fields are the fields of a head in their order. Several may have the same name. Methods take canonical names. Set and
// Drop change the fields in place: other values that share them must be copied before.
type Fields []Field

// Of returns the fields of a header of net/http.
func Of(h map[string][]string) Fields {
	if len(h) == 0 {
		return nil
	}
	f := make(Fields, 0, len(h))
	for name, values := range h {
		for _, v := range values {
			f = append(f, Field{name, v})
		}
	}
	return f
}

// AddTo adds the fields to a header of net/http.
func (f Fields) AddTo(h map[string][]string) {
	for _, one := range f {
		h[one.Name] = append(h[one.Name], one.Value)
	}
}

// Get returns the first value of a field, empty if there is none.
func (f Fields) Get(name string) string {
	if i := f.index(name); i >= 0 {
		return f[i].Value
	}
	return ""
}

// Count returns the first value of a field, and how many there are.
func (f Fields) Count(name string) (first string, n int) {
	for i := range f {
		if f[i].Name != name {
			continue
		}
		if n++; n == 1 {
			first = f[i].Value
		}
	}
	return first, n
}

// Has reports whether there is such a field.
func (f Fields) Has(name string) bool { return f.index(name) >= 0 }

// Values returns the values of a field in their order.
func (f Fields) Values(name string) (values []string) {
	for i := range f {
		if f[i].Name == name {
			values = append(values, f[i].Value)
		}
	}
	return values
}

// Set replaces all values of a field by one.
func (f *Fields) Set(name, value string) {
	i := f.index(name)
	if i < 0 {
		*f = append(*f, Field{name, value})
		return
	}
	(*f)[i].Value = value
	rest := (*f)[i+1:]
	*f = (*f)[:i+1+len(slices.DeleteFunc(rest, func(other Field) bool { return other.Name == name }))]
}

// Drop removes the fields of the given names.
func (f *Fields) Drop(names ...string) {
	*f = slices.DeleteFunc(*f, func(one Field) bool { return slices.Contains(names, one.Name) })
}

// Weight returns the memory that the fields take, in bytes.
func (f Fields) Weight() (n int64) {
	for i := range f {
		n += listen.FieldWeight + int64(len(f[i].Name)+len(f[i].Value))
	}
	return n
}

// maxTrailer bounds the names that are announced for one trailer.
const maxTrailer = 64

// TrailerNames returns the names of the fields that a trailer may have, by the values of Trailer: each once.
func TrailerNames(values []string) (names []string) {
	for _, list := range values {
		for name := range strings.SplitSeq(list, ",") {
			name = http.CanonicalHeaderKey(strings.TrimSpace(name))
			if len(names) == maxTrailer {
				return names
			}
			if name != "" && httpguts.ValidTrailerHeader(name) && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

func (f Fields) index(name string) int {
	for i := range f {
		if f[i].Name == name {
			return i
		}
	}
	return -1
}
