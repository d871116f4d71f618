package pipeline

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// Request is a request as its client sent it. Stages do not edit it.
type Request struct {
	Ctx    context.Context // ends when the client goes away
	Method string
	Target string // as sent
	// Path is decoded, Escaped is as sent; both are empty if the target is not a path.
	Path, Escaped string
	Query         string // raw
	BareQuery     bool   // the target ends in "?"
	Host          string
	Header        header.Fields
	Length        int64 // of the body in bytes; -1: unknown
	Body          Body
	Certificate   bool   // the client presented one
	Proto         string // version of HTTP

	// Cluster is the member cluster that it goes to; empty: the apiserver's own. Info is about
	// the request in that cluster.
	Cluster   string
	Info      *RequestInfo           // nil: not classified, or malformed
	Malformed *apierrors.StatusError // not nil: it cannot be classified
	paths     ClusterPaths           // by which it was classified
}

// Versions of HTTP.
const (
	HTTP10 = "HTTP/1.0"
	HTTP2  = "HTTP/2.0"
)

// Forget frees everything whose size clients choose.
func (r *Request) Forget() {
	r.Target, r.Path, r.Escaped, r.Query, r.Host, r.Header = "", "", "", "", "", nil
}

// Gone returns why the client is gone, nil if it is not.
func (r *Request) Gone() error { return r.Ctx.Err() }

// Reads reports whether the method changes nothing.
func (r *Request) Reads() bool { return r.Method == http.MethodGet || r.Method == http.MethodHead }

// Body is the body of a request. What was read is kept until it is sent, so that it can be
// read again from the beginning.
type Body struct {
	Rest  io.Reader     // not read yet
	early *upstream.Buf // the beginning, up to the size of a buffer; nil: nothing was read
	ended bool          // early is all of it
	whole []byte        // not nil: all of it, as a stage read it
}

// reader returns a reader of all of the body.
func (b *Body) reader() io.Reader {
	switch {
	case b.whole != nil:
		return bytes.NewReader(b.whole)
	case b.early == nil:
		return b.Rest
	case b.ended:
		return bytes.NewReader(b.early.B)
	}
	return io.MultiReader(bytes.NewReader(b.early.B), b.Rest)
}

// begun reports whether some of the body was read.
func (b *Body) begun() bool { return b.whole != nil || b.early != nil }

// begin reads the beginning of the body, up to the size of a buffer.
func (b *Body) begin() error {
	b.early = upstream.Buffer()
	n, err := Fill(b.Rest, b.early.B)
	b.early.B = b.early.B[:n]
	if b.ended = err == io.EOF; b.ended { //nolint:errorlint // a wrapped one is a body cut short
		return nil
	}
	return err
}

// Free returns the buffer after the body was sent.
func (b *Body) Free() {
	if b.early != nil {
		b.early.Free()
		b.early = nil
	}
}

// Outgoing is the request as it is sent upstream, with the edits of stages.
type Outgoing struct {
	Path, Query string // escaped, raw
	Header      header.Fields
	edited      bool // Header is a copy
	Body        io.Reader
	Length      int64 // of Body in bytes; -1: unknown
}

// Outgoing returns the request unedited.
func (r *Request) Outgoing() Outgoing {
	return Outgoing{Path: r.Escaped, Query: r.Query, Header: r.Header, Body: r.Body.reader(), Length: r.Length}
}

// Set sets a field of the head.
func (o *Outgoing) Set(name, value string) { o.own().Set(name, value) }

// Drop removes a field of the head.
func (o *Outgoing) Drop(name string) {
	if o.Header.Has(name) {
		o.own().Drop(name)
	}
}

// own returns a header that can be edited.
func (o *Outgoing) own() *header.Fields {
	if !o.edited {
		o.Header, o.edited = slices.Clone(o.Header), true
	}
	return &o.Header
}

// Replace sets the body that is sent.
func (o *Outgoing) Replace(body []byte) {
	o.Body, o.Length = bytes.NewReader(body), int64(len(body))
}

// Fill reads until p is full or r ends. Unlike io.ReadFull, it distinguishes a truncated
// body from its end.
func Fill(r io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var m int
		m, err = r.Read(p[n:])
		n += m
	}
	return n, err
}

// AuditHeader is the header field Audit-ID, as net/http spells it.
const AuditHeader = "Audit-Id"

// hopByHop headers concern one connection only (RFC 9110, 7.6.1).
var hopByHop = []string{
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Expect",
}

// DropHopByHop removes the fields that concern only the client's connection.
func (o *Outgoing) DropHopByHop() {
	if slices.ContainsFunc(o.Header, func(f header.Field) bool { return slices.Contains(hopByHop, f.Name) }) {
		DropHopByHop(o.own())
	}
}

// DropHopByHop removes the fields that concern one connection only.
func DropHopByHop(h *header.Fields) {
	if lines := h.Values("Connection"); lines != nil {
		listed := map[string]bool{}
		for _, line := range lines {
			for name := range strings.SplitSeq(line, ",") {
				listed[textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name))] = true
			}
		}
		*h = slices.DeleteFunc(*h, func(f header.Field) bool { return listed[f.Name] })
	}
	h.Drop(hopByHop...)
}

// Bounded returns the beginning of a text that a client chose, for logs.
func Bounded(id string) string { return id[:min(len(id), 64)] }
