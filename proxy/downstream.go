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

	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/guard"
)

// ServeHTTP serves one request of the pod.
func (p *Pod) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	x := &exchange{
		pod:      p,
		holding:  holding{pod: p},
		response: response{client: newDownstream(p, w, r)},
		req:      newRequest(r),
		start:    time.Now(),
		debug:    p.server.log.Enabled(context.Background(), slog.LevelDebug),
	}
	if c := x.client.conn; c != nil {
		c.enter()
		defer c.leave()
	}
	x.run()
}

// downstream is the client's side of an exchange, as net/http serves it. Whatever may
// wait for an HTTP/2 client is guarded.
type downstream struct {
	w     http.ResponseWriter
	r     *http.Request
	guard *guard.Guard // of HTTP/2
	conn  *conn        // nil in tests
	// last: the client is to ask no more on this connection.
	last     bool
	draining context.Context // when it ends, last is true of every connection
}

func newDownstream(p *Pod, w http.ResponseWriter, r *http.Request) downstream {
	d := downstream{w: w, r: r, conn: connOf(r), draining: p.draining}
	if r.ProtoMajor == 2 {
		d.guard = guard.New(w, p.stall)
	}
	return d
}

// errAbort is the value of a panic that ends an exchange so that the client sees that its
// response is not whole.
var errAbort = http.ErrAbortHandler

// head sends the status code and header of a response, and announces its trailer.
func (d *downstream) head(code int, fields, trailer header) {
	h := d.w.Header()
	maps.Copy(h, fields)
	for name := range trailer {
		h.Add("Trailer", name)
	}
	d.close()
	d.w.WriteHeader(code)
}

// close tells the client to ask no more on this connection, if that is so.
func (d *downstream) close() {
	if d.last || d.draining.Err() != nil {
		d.w.Header()["Connection"] = []string{"close"}
	}
}

// trailer sends the trailer that was announced in head.
func (d *downstream) trailer(fields header) { maps.Copy(d.w.Header(), fields) }

func (d *downstream) write(p []byte) (int, error) {
	d.guard.Arm()
	n, err := d.w.Write(p)
	d.guard.Disarm()
	return n, err
}

// flush sends what was written.
func (d *downstream) flush() {
	if f, ok := d.w.(http.Flusher); ok {
		d.guard.Arm()
		f.Flush()
		d.guard.Disarm()
	}
}

// refuse sends a refusal. It returns the size of its body in bytes.
func (d *downstream) refuse(err *apierrors.StatusError) int {
	d.close()
	d.guard.Arm()
	defer d.guard.Disarm()
	return status.Write(d.w, d.r, err)
}

// hijack takes the connection over, with what was read from it already.
func (d *downstream) hijack() (net.Conn, io.Reader, error) {
	conn, buffered, err := http.NewResponseController(d.w).Hijack()
	if err != nil {
		return nil, nil, err
	}
	// The server's deadlines do not hold for what the connection is now.
	if d.conn != nil {
		d.conn.upgraded.Store(true)
	}
	_ = conn.SetDeadline(time.Time{})
	return conn, buffered, nil
}

// writeSwitch tells a client whose connection was taken over that it has changed protocol.
func writeSwitch(w io.Writer, fields header, protocol string) error {
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

// closeConn closes the client's connection.
func (d *downstream) closeConn() {
	if d.conn != nil {
		_ = d.conn.Close()
	}
}

// reset breaks off the client's connection, or its HTTP/2 stream, without an end.
func (d *downstream) reset() {
	if d.conn != nil && d.r.ProtoMajor == 1 {
		d.conn.reset()
	}
	panic(errAbort)
}

var nowhere = &url.URL{}

// forget lets go of the head but for a beginning of Accept: net/http keeps it until it
// has done with the request.
func (d *downstream) forget(accept int) {
	kept := d.r.Header.Get("Accept")
	d.r.Header, d.r.URL, d.r.RequestURI, d.r.Host = nil, nowhere, "", ""
	if kept != "" && accept > 0 {
		d.r.Header = http.Header{"Accept": {kept[:min(len(kept), accept)]}}
	}
}

// newRequest returns a request that net/http received.
func newRequest(r *http.Request) request {
	out := request{
		ctx:    r.Context(),
		method: r.Method, target: r.RequestURI, query: r.URL.RawQuery, bareQuery: r.URL.ForceQuery, host: r.Host,
		header: header(r.Header), length: r.ContentLength, body: body{rest: r.Body},
		certificate: r.TLS != nil && len(r.TLS.PeerCertificates) > 0,
		proto:       r.Proto,
	}
	if r.URL.Opaque == "" {
		out.path, out.escaped = r.URL.Path, r.URL.EscapedPath()
	}
	return out
}
