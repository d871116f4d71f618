package http2

import (
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// HTTP has a handler of net/http serve streams.
func HTTP(h http.Handler) func(*Stream) {
	return func(s *Stream) {
		w := &writer{s: s, header: http.Header{}}
		h.ServeHTTP(w, s.request())
		w.finish()
	}
}

// request returns the request of net/http.
func (s *Stream) request() *http.Request {
	h := make(http.Header, len(s.req.Header))
	s.req.Header.AddTo(h)
	trailer := header.TrailerNames(h["Trailer"])
	delete(h, "Trailer")
	r := (&http.Request{
		Method: s.req.Method, URL: &s.req.URL, RequestURI: s.req.Target, Host: s.req.Host,
		Proto: "HTTP/2.0", ProtoMajor: 2, Header: h, ContentLength: s.req.Length, Body: http.NoBody,
		TLS: s.c.state, RemoteAddr: s.c.remote,
	}).WithContext(s.ctx.standard())
	if s.req.Length == 0 {
		return r
	}
	r.Body = &s.body
	if trailer != nil {
		r.Trailer = http.Header{}
		for _, name := range trailer {
			r.Trailer[name] = nil
		}
		r.Body = &trailed{&s.body, r}
	}
	return r
}

// trailed fills in the trailer of a request at the end of its body.
type trailed struct {
	*body
	r *http.Request
}

func (t *trailed) Read(p []byte) (int, error) {
	n, err := t.body.Read(p)
	if err == io.EOF { //nolint:errorlint // what body.Read returns
		for _, f := range t.takeTrailer() {
			if _, announced := t.r.Trailer[f.Name]; announced {
				t.r.Trailer.Add(f.Name, f.Value)
			}
		}
	}
	return n, err
}

// writer is the http.ResponseWriter of a stream.
type writer struct {
	s      *Stream
	header http.Header
	begun  bool
	// announced are the names of the fields of the trailer.
	announced []string
}

// Header implements http.ResponseWriter.
func (w *writer) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter. Informational responses are sent at once, others with the body.
func (w *writer) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic("http2: invalid status code " + strconv.Itoa(status))
	}
	if w.begun {
		return
	}
	if status >= 200 {
		w.begun, w.announced = true, header.TrailerNames(w.header["Trailer"])
		if httpguts.HeaderValuesContainsToken(w.header["Connection"], "close") {
			w.s.Last()
		}
	}
	if date, ok := w.header["Date"]; ok && len(date) == 0 { // as net/http has it: none is added
		w.s.resp.undated = true
	}
	fields, _ := w.fields()
	w.s.Respond(status, fields, w.announced)
}

// fields returns the fields of the head, and those of the trailer: what the head announced, and what has
// http.TrailerPrefix.
func (w *writer) fields() (head, trailer header.Fields) {
	for name, values := range w.header {
		to := &head
		if late, prefixed := strings.CutPrefix(name, http.TrailerPrefix); prefixed || slices.Contains(w.announced, name) {
			to, name = &trailer, http.CanonicalHeaderKey(late)
		} else if name == "Trailer" {
			continue
		}
		for _, v := range values {
			*to = append(*to, header.Field{Name: name, Value: v})
		}
	}
	return head, trailer
}

// Write implements io.Writer.
func (w *writer) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.s.Write(p)
}

// finish sends the head if it was not sent, and the trailer.
func (w *writer) finish() {
	if !w.begun {
		if _, declared := w.header["Content-Length"]; !declared && w.s.req.Method != http.MethodHead {
			w.header["Content-Length"] = []string{"0"}
		}
		w.WriteHeader(http.StatusOK)
	}
	_, trailer := w.fields()
	w.s.Trailer(trailer)
}

// FlushError is for http.ResponseController.
func (w *writer) FlushError() error {
	w.WriteHeader(http.StatusOK)
	return w.s.flushError()
}

// Flush implements http.Flusher.
func (w *writer) Flush() { _ = w.FlushError() }

// EnableFullDuplex is for http.ResponseController: a stream always is.
func (w *writer) EnableFullDuplex() error { return nil }

// SetReadDeadline is for http.ResponseController.
func (w *writer) SetReadDeadline(t time.Time) error {
	w.s.setReadDeadline(t)
	return nil
}

// SetWriteDeadline is for http.ResponseController. The stream is reset at the deadline.
func (w *writer) SetWriteDeadline(t time.Time) error {
	w.s.setWriteDeadline(t)
	return nil
}
