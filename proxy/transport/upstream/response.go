package upstream

import (
	"io"
	"net/http"
)

// Response is the answer of the apiserver.
type Response struct {
	Status  int
	Header  map[string][]string // by canonical names
	Trailer map[string][]string // valid at the end of Body
	Body    io.ReadCloser       // must be closed
}

func responseOf(r *http.Response, err error) (Response, error) {
	if err != nil {
		return Response{}, err
	}
	r.Request = nil // net/http keeps r as long as the body is open
	return Response{r.StatusCode, r.Header, r.Trailer, r.Body}, nil
}

// Get returns the first value of a header field, by its canonical name.
func (r *Response) Get(name string) string {
	if values := r.Header[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// Wrap replaces the reader of the body. Close still closes the original body.
func (r *Response) Wrap(by io.Reader) { r.Body = wrapped{by, r.Body} }

// Replace is Wrap with a reader of unknown length.
func (r *Response) Replace(by io.Reader) {
	r.Wrap(by)
	delete(r.Header, "Content-Length")
}

type wrapped struct {
	io.Reader
	io.Closer
}
