package upstream

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// Response is the answer of the apiserver.
type Response struct {
	Status  int
	Header  header.Fields
	Trailer *Trailer      // nil: none was announced
	Body    io.ReadCloser // must be closed
}

// Trailer has the fields that follow a body.
type Trailer struct {
	Names  []string      // as announced
	Fields header.Fields // of these names, at the end of the body
}

func (t *Trailer) set(fields header.Fields) {
	t.Fields = slices.DeleteFunc(fields, func(f header.Field) bool { return !slices.Contains(t.Names, f.Name) })
}

// responseOf returns a response of net/http.
func responseOf(r *http.Response, err error) (Response, error) {
	if err != nil {
		return Response{}, err
	}
	if r.StatusCode < 200 || r.StatusCode > 999 {
		_ = r.Body.Close()
		return Response{}, fmt.Errorf("%w: status %d", errMalformed, r.StatusCode)
	}
	r.Request = nil // net/http keeps r as long as the body is open
	out := Response{Status: r.StatusCode, Header: header.Of(r.Header), Body: r.Body}
	if len(r.Trailer) > 0 {
		out.Trailer = &Trailer{Names: header.TrailerNames(slices.Collect(maps.Keys(r.Trailer)))}
		out.Body = &trailed{r.Body, r.Trailer, out.Trailer}
	}
	return out, nil
}

// trailed sets a trailer at the end of a body.
type trailed struct {
	io.ReadCloser
	from http.Header
	to   *Trailer
}

func (t *trailed) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if err == io.EOF {
		t.to.set(header.Of(t.from))
	}
	return n, err
}

// Get returns the first value of a header field, by its canonical name.
func (r *Response) Get(name string) string { return r.Header.Get(name) }

// SetLength sets the declared length of the body in bytes.
func (r *Response) SetLength(n int) { r.Header.Set("Content-Length", strconv.Itoa(n)) }

// Wrap replaces the reader of the body. Close still closes the original body.
func (r *Response) Wrap(by io.Reader) { r.Body = wrapped{by, r.Body} }

// Replace is Wrap with a reader of unknown length.
func (r *Response) Replace(by io.Reader) {
	r.Wrap(by)
	r.Header.Drop("Content-Length")
}

type wrapped struct {
	io.Reader
	io.Closer
}
