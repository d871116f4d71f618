package proxy

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/http2"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// ServeHTTP serves a request of the pod in HTTP/1.1.
func (p *Pod) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	newExchange(p, newRequest(r), &http1{w, r}).run()
}

// ServeStream serves a request of the pod in HTTP/2.
func (p *Pod) ServeStream(s *http2.Stream) {
	newExchange(p, newStreamRequest(s), s).run()
}

// newExchange is a function of its own because its frame is large, and that of the callers
// stays on the stack as long as the request lasts.
func newExchange(p *Pod, r pipeline.Request, to responder) *exchange {
	return &exchange{
		State: pipeline.State{
			Memory: pipeline.Holding{Budgets: &p.budgets},
			Req:    r,
			Debug:  p.server.log.Enabled(context.Background(), slog.LevelDebug),
		},
		pod:      p,
		response: response{client: client{to, downstream.Of[*downstream.Conn](r.Ctx), false, p.env.Draining}},
		start:    time.Now(),
	}
}

// responder is the server of a connection, as far as one response is concerned.
type responder interface {
	// Respond sends the head. trailer has the names of the fields that Trailer sets.
	Respond(code int, fields header.Fields, trailer []string)
	Trailer(fields header.Fields)
	Write(p []byte) (int, error)
	// Flush sends what was written.
	Flush()
	// Last announces, before the head, the end of the connection.
	Last()
	// Forget frees the head of the request.
	Forget()
}

// client is the client's side of an exchange.
type client struct {
	responder
	conn     *downstream.Conn // nil in tests
	last     bool             // close the connection after this response
	draining context.Context  // when it is done, last applies to every connection
}

// errAbort is the value of a panic that ends an exchange so that the client detects that
// its response is incomplete.
var errAbort = http.ErrAbortHandler

// head sends the status code and header of a response, and announces its trailer.
func (c *client) head(code int, fields header.Fields, trailer *upstream.Trailer) {
	if c.last || c.draining.Err() != nil {
		c.Last()
	}
	var names []string
	if trailer != nil {
		names = trailer.Names
	}
	c.Respond(code, fields, names)
}

// trailer sends the trailer that was announced in head.
func (c *client) trailer(t *upstream.Trailer) {
	if t != nil {
		c.Trailer(t.Fields)
	}
}

// hijack takes the connection over. The reader returns what the server has read of it, then
// the rest.
func (c *client) hijack() (net.Conn, io.Reader, error) {
	h, ok := c.responder.(*http1)
	if !ok {
		return nil, nil, http.ErrNotSupported
	}
	conn, buffered, err := http.NewResponseController(h.w).Hijack()
	if err != nil {
		return nil, nil, err
	}
	// The server's deadlines do not apply any more.
	if c.conn != nil {
		c.conn.Upgraded.Store(true)
	}
	_ = conn.SetDeadline(time.Time{})
	return conn, buffered, nil
}

// reset resets the client's connection, or its HTTP/2 stream.
func (c *client) reset() {
	if _, ok := c.responder.(*http1); ok && c.conn != nil {
		c.conn.Reset()
		_ = c.conn.Close()
	}
	panic(errAbort)
}

// http1 is the responder of HTTP/1.1, which net/http serves.
type http1 struct {
	w http.ResponseWriter
	r *http.Request
}

func (h *http1) Respond(code int, fields header.Fields, trailer []string) {
	to := h.w.Header()
	fields.AddTo(to)
	if trailer != nil {
		to["Trailer"] = trailer
	}
	h.w.WriteHeader(code)
}

func (h *http1) Trailer(fields header.Fields) {
	to := h.w.Header()
	for _, f := range fields { // a field of the head may have the name, too
		delete(to, f.Name)
	}
	fields.AddTo(to)
}

func (h *http1) Write(p []byte) (int, error) { return h.w.Write(p) }

func (h *http1) Flush() {
	if f, ok := h.w.(http.Flusher); ok {
		f.Flush()
	}
}

func (h *http1) Last() { h.w.Header()["Connection"] = []string{"close"} }

var nowhere = &url.URL{}

// Forget frees what the server refers to until the request is over.
func (h *http1) Forget() {
	h.r.Header, h.r.URL, h.r.RequestURI, h.r.Host = nil, nowhere, "", ""
}

// writeSwitch answers 101 to a client whose connection was taken over.
func writeSwitch(w io.Writer, fields header.Fields, protocol string) error {
	h := http.Header{}
	fields.AddTo(h)
	h["Connection"], h["Upgrade"] = []string{"Upgrade"}, []string{protocol}
	var head strings.Builder
	head.WriteString("HTTP/1.1 101 Switching Protocols\r\n")
	if err := h.Write(&head); err != nil {
		return err
	}
	head.WriteString("\r\n")
	_, err := io.WriteString(w, head.String())
	return err
}

// newRequest returns a request in HTTP/1.1.
func newRequest(r *http.Request) pipeline.Request {
	r.Trailer = nil // its names, which nobody asks for, are not in the weight
	out := pipeline.Request{
		Ctx:    r.Context(),
		Method: r.Method, Target: r.RequestURI, Host: r.Host,
		Header: header.Of(r.Header), Length: r.ContentLength, Body: pipeline.Body{Rest: r.Body},
		Certificate: presents(r.TLS),
		Proto:       r.Proto,
	}
	setTarget(&out, r.URL)
	return out
}

// newStreamRequest returns a request in HTTP/2.
func newStreamRequest(s *http2.Stream) pipeline.Request {
	r := s.Request()
	out := pipeline.Request{
		Ctx:    s.Context(),
		Method: r.Method, Target: r.Target, Host: r.Host,
		Header: r.Header, Length: r.Length, Body: pipeline.Body{Rest: s.Body()},
		Certificate: presents(s.TLS()),
		Proto:       pipeline.HTTP2,
	}
	setTarget(&out, &r.URL)
	return out
}

func setTarget(r *pipeline.Request, u *url.URL) {
	r.Query, r.BareQuery = u.RawQuery, u.ForceQuery
	if u.Opaque == "" {
		r.Path, r.Escaped = u.Path, u.EscapedPath()
	}
}

// presents reports whether the client has presented a certificate.
func presents(c *tls.ConnectionState) bool { return c != nil && len(c.PeerCertificates) > 0 }
