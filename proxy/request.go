package proxy

import (
	"bytes"
	"context"
	"io"
	"maps"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// request is a request as its client sent it. Its evaluation does not change it.
type request struct {
	ctx    context.Context // ends when the client goes away
	method string
	target string // as sent
	// path is decoded, escaped is as sent; both are empty if the target is not a path.
	path, escaped string
	query         string // raw
	bareQuery     bool   // the target ends in "?"
	host          string
	header        header
	length        int64 // of the body in bytes; -1: unknown
	body          body
	certificate   bool   // the client presented one
	proto         string // version of HTTP

	info      *apirequest.RequestInfo // nil: not classified, or malformed
	malformed *apierrors.StatusError  // not nil: it cannot be classified
}

// Versions of HTTP.
const (
	proto10 = "HTTP/1.0"
	proto2  = "HTTP/2.0"
)

// forget frees everything whose size clients choose.
func (r *request) forget() {
	r.target, r.path, r.escaped, r.query, r.host, r.header = "", "", "", "", "", nil
}

// gone returns why the client is gone, nil if it is not.
func (r *request) gone() error { return r.ctx.Err() }

// reads reports whether the method changes nothing.
func (r *request) reads() bool { return r.method == http.MethodGet || r.method == http.MethodHead }

// header has the fields of a head by their canonical names.
type header map[string][]string

// get returns the first value of a field, by its canonical name.
func (h header) get(name string) string {
	if values := h[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// body is the body of a request. What was read is kept until it is sent, so that it can be
// read again from the beginning.
type body struct {
	rest  io.Reader     // not read yet
	early *upstream.Buf // the beginning, up to the size of a buffer; nil: nothing was read
	ended bool          // early is all of it
	whole []byte        // not nil: all of it, as a stage read it
}

// reader returns a reader of all of the body.
func (b *body) reader() io.Reader {
	switch {
	case b.whole != nil:
		return bytes.NewReader(b.whole)
	case b.early == nil:
		return b.rest
	case b.ended:
		return bytes.NewReader(b.early.B)
	}
	return io.MultiReader(bytes.NewReader(b.early.B), b.rest)
}

// begun reports whether some of the body was read.
func (b *body) begun() bool { return b.whole != nil || b.early != nil }

// begin reads the beginning of the body, up to the size of a buffer.
func (b *body) begin() error {
	b.early = upstream.Buffer()
	n, err := fill(b.rest, b.early.B)
	b.early.B = b.early.B[:n]
	if b.ended = err == io.EOF; b.ended { //nolint:errorlint // a wrapped one is a body cut short
		return nil
	}
	return err
}

// free returns the buffer after the body was sent.
func (b *body) free() {
	if b.early != nil {
		b.early.Free()
		b.early = nil
	}
}

// outgoing is the request as it is sent upstream, with the edits of stages.
type outgoing struct {
	path, query string // escaped, raw
	header      header
	edited      bool // header is a copy
	body        io.Reader
	length      int64 // of body in bytes; -1: unknown
}

// outgoing returns the request unedited.
func (r *request) outgoing() outgoing {
	return outgoing{path: r.escaped, query: r.query, header: r.header, body: r.body.reader(), length: r.length}
}

// set sets a field of the head.
func (o *outgoing) set(name, value string) { o.own()[name] = []string{value} }

// drop removes a field of the head.
func (o *outgoing) drop(name string) {
	if _, ok := o.header[name]; ok {
		delete(o.own(), name)
	}
}

// own returns a header that can be edited.
func (o *outgoing) own() header {
	if !o.edited {
		o.header, o.edited = maps.Clone(o.header), true
	}
	return o.header
}

// replace sets the body that is sent.
func (o *outgoing) replace(body []byte) {
	o.body, o.length = bytes.NewReader(body), int64(len(body))
}
