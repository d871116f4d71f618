package upstream

import (
	"io"
	"net/http"
)

// Response is what the apiserver answers.
type Response struct {
	Status  int
	Header  map[string][]string // by canonical names
	Trailer map[string][]string // has its values when Body is at its end
	Body    io.ReadCloser       // must be closed
}

func responseOf(r *http.Response, err error) (Response, error) {
	if err != nil {
		return Response{}, err
	}
	return Response{r.StatusCode, r.Header, r.Trailer, r.Body}, nil
}

// Get returns the first value of a header field, by its canonical name.
func (r *Response) Get(name string) string {
	if values := r.Header[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// Wrap has the body be read by another reader. Closing it closes the body.
func (r *Response) Wrap(by io.Reader) { r.Body = wrapped{by, r.Body} }

// Replace is Wrap by a reader of another length, which is not known.
func (r *Response) Replace(by io.Reader) {
	r.Wrap(by)
	delete(r.Header, "Content-Length")
}

type wrapped struct {
	io.Reader
	io.Closer
}
