package egress

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// halfClosed is how long a client that has closed its side is served. Whether it is still
// there shows only when the answer is sent.
const halfClosed = 2 * time.Minute

// conn is a connection of the pod.
type conn struct {
	*downstream.Conn
	s        *Server
	early    []byte // read while sniffing, and not returned by Read yet
	target   target
	around   connect
	server   server
	patience patience
}

// target is what the requests of a connection are for. It is set before they are read.
type target struct {
	to       netip.AddrPort // original destination
	protocol string
	scheme   string
	port     uint16
	host     string   // server name of TLS: requests must be for this host
	via      []string // hosts of the CONNECTs around the connection; rules apply to these too
}

// connect is the last CONNECT around a connection.
type connect struct {
	ticket limit.Ticket  // the tunnel is part of it
	met    fault.Met     // fault rules that matched it
	faults *fault.Faults // those of answers are still to be injected
}

// server is how a connection reaches the server of its requests.
type server struct {
	up         dialer
	transport  *http.Transport // uses up
	unverified error           // if not nil: why there is no transport
	leafless   bool            // there was no certificate to decrypt the connection with
	awaiting   atomic.Int32    // heads of answers; at most one, except in HTTP/2, whose heads are bounded by connection
}

// dialer connects to the server of a connection's requests.
type dialer func(context.Context) (net.Conn, error)

// patience lets a client close its side and wait for the answer.
type patience struct {
	patient bool
	reading atomic.Int64 // the read deadline, in Unix nanoseconds; 0: none
	moved   chan struct{}
}

func newConn(s *Server, accepted *downstream.Conn, to netip.AddrPort) *conn {
	c := &conn{Conn: accepted, s: s, patience: patience{moved: make(chan struct{}, 1)}}
	c.target.to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	c.target.port = to.Port()
	c.server.up = c.dial
	return c
}

// dial connects to the original destination of c.
func (c *conn) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return c.s.Dial(ctx, "tcp", c.target.to.String())
}

func (c *conn) Read(b []byte) (int, error) {
	if len(c.early) > 0 {
		n := copy(b, c.early)
		if c.early = c.early[n:]; len(c.early) == 0 {
			c.early = nil
		}
		return n, nil
	}
	n, err := c.Conn.Read(b)
	// While a request is served, net/http reads one byte to detect that the client has
	// disconnected. It takes a half-closed connection for a closed one.
	if err == io.EOF && len(b) == 1 && c.patience.patient { //nolint:errorlint // as net/http
		err = c.patience.wait(c.Life)
	}
	return n, err
}

// wait blocks the read of a half-closed connection, so that its request is served to
// the end.
func (p *patience) wait(life context.Context) error {
	timeout := time.After(halfClosed)
	for {
		if at := p.reading.Load(); at != 0 && at <= time.Now().UnixNano() {
			return os.ErrDeadlineExceeded
		}
		select {
		case <-p.moved:
		case <-life.Done():
			return net.ErrClosed
		case <-timeout:
			return io.EOF
		}
	}
}

// SetDeadline implements net.Conn.
func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn. It records the deadline for wait.
func (c *conn) SetReadDeadline(t time.Time) error {
	at := int64(0)
	if !t.IsZero() {
		at = max(1, t.UnixNano())
	}
	c.patience.reading.Store(at)
	err := c.Conn.SetReadDeadline(t)
	select {
	case c.patience.moved <- struct{}{}:
	default:
	}
	return err
}
