package proxy

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// ServeHTTP serves one request of the pod.
func (p *Pod) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	newExchange(p, w, r).run()
}

// newExchange is a function of its own because its frame is large, and that of ServeHTTP
// stays on the stack as long as the request lasts.
func newExchange(p *Pod, w http.ResponseWriter, r *http.Request) *exchange {
	return &exchange{
		State: pipeline.State{
			Memory: pipeline.Holding{Budgets: &p.budgets},
			Req:    newRequest(r),
			Debug:  p.server.log.Enabled(context.Background(), slog.LevelDebug),
		},
		pod:      p,
		response: response{client: newClient(p, w, r)},
		start:    time.Now(),
	}
}

// client is the client's side of an exchange, as the server has it.
type client struct {
	w        http.ResponseWriter
	r        *http.Request
	conn     *downstream.Conn // nil in tests
	last     bool             // close the connection after this response
	draining context.Context  // when it is done, last applies to every connection
}

func newClient(p *Pod, w http.ResponseWriter, r *http.Request) client {
	return client{w: w, r: r, conn: downstream.Of[*downstream.Conn](r), draining: p.env.Draining}
}

// errAbort is the value of a panic that ends an exchange so that the client detects that
// its response is incomplete.
var errAbort = http.ErrAbortHandler

// head sends the status code and header of a response, and announces its trailer.
func (c *client) head(code int, fields, trailer pipeline.Header) {
	h := c.w.Header()
	maps.Copy(h, fields)
	for name := range trailer {
		h.Add("Trailer", name)
	}
	c.close()
	c.w.WriteHeader(code)
}

// close announces the end of the connection if this response is its last.
func (c *client) close() {
	if c.last || c.draining.Err() != nil {
		c.w.Header()["Connection"] = []string{"close"}
	}
}

// trailer sends the trailer that was announced in head.
func (c *client) trailer(fields pipeline.Header) { maps.Copy(c.w.Header(), fields) }

func (c *client) write(p []byte) (int, error) { return c.w.Write(p) }

// flush sends what was written.
func (c *client) flush() {
	if f, ok := c.w.(http.Flusher); ok {
		f.Flush()
	}
}

// refuse sends a refusal. It returns the size of its body in bytes.
func (c *client) refuse(err *apierrors.StatusError) int {
	c.close()
	return status.Write(c.w, c.r, err)
}

// hijack takes the connection over. The reader returns what the server has read of it, then
// the rest.
func (c *client) hijack() (net.Conn, io.Reader, error) {
	conn, buffered, err := http.NewResponseController(c.w).Hijack()
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

// writeSwitch answers 101 to a client whose connection was taken over.
func writeSwitch(w io.Writer, fields pipeline.Header, protocol string) error {
	fields["Connection"] = []string{"Upgrade"}
	fields["Upgrade"] = []string{protocol}
	var head strings.Builder
	head.WriteString("HTTP/1.1 101 Switching Protocols\r\n")
	if err := http.Header(fields).Write(&head); err != nil {
		return err
	}
	head.WriteString("\r\n")
	_, err := io.WriteString(w, head.String())
	return err
}

// reset resets the client's connection, or its HTTP/2 stream.
func (c *client) reset() {
	if c.conn != nil && c.r.ProtoMajor == 1 {
		c.conn.Reset()
		_ = c.conn.Close()
	}
	panic(errAbort)
}

var nowhere = &url.URL{}

// forget releases the head, which the server refers to until the request is over. It keeps
// at most accept bytes of Accept.
func (c *client) forget(accept int) {
	kept := c.r.Header.Get("Accept")
	c.r.Header, c.r.URL, c.r.RequestURI, c.r.Host = nil, nowhere, "", ""
	if kept != "" && accept > 0 {
		c.r.Header = http.Header{"Accept": {kept[:min(len(kept), accept)]}}
	}
}

// newRequest returns a request that the server received.
func newRequest(r *http.Request) pipeline.Request {
	out := pipeline.Request{
		Ctx:    r.Context(),
		Method: r.Method, Target: r.RequestURI, Query: r.URL.RawQuery, BareQuery: r.URL.ForceQuery, Host: r.Host,
		Header: pipeline.Header(r.Header), Length: r.ContentLength, Body: pipeline.Body{Rest: r.Body},
		Certificate: r.TLS != nil && len(r.TLS.PeerCertificates) > 0,
		Proto:       r.Proto,
	}
	if r.URL.Opaque == "" {
		out.Path, out.Escaped = r.URL.Path, r.URL.EscapedPath()
	}
	return out
}
