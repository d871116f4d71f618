package egress

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
)

const (
	// stall is how long a client may stop reading, on a connection or an HTTP/2 stream.
	stall = time.Minute
	// halfClosed is how long a client that has closed its side is served. Whether it is
	// still there shows only when the answer is sent.
	halfClosed = 2 * time.Minute
	// unservedWeight is how many bytes of memory a byte of a handshake or a head can
	// take.
	unservedWeight = 16
)

var errTooMuch = errors.New("too many bytes before a request or before the answer to it")

// conn is a connection of the pod. The pod's accounts contain it until it is closed.
type conn struct {
	net.Conn
	s     *Server
	to    netip.AddrPort
	early []byte // read while sniffing, and not returned by Read yet

	// The target of its requests. Set before it is served.
	scheme   string
	port     uint16
	host     string        // server name of TLS: requests must be for this host
	via      []string      // hosts of the CONNECTs around it; rules apply to these too
	ticket   limit.Ticket  // of the last CONNECT, which the tunnel is part of
	met      fault.Met     // fault rules that matched this CONNECT
	harm     *fault.Faults // of this CONNECT: the faults of answers are still to be injected
	leafless bool          // there was no certificate to decrypt it with
	protocol string
	patient  bool // its client may close its side and wait for the answer

	up         way             // connects to the server of the requests
	transport  *http.Transport // uses up
	unverified error           // if not nil: why there is no transport

	life      context.Context // done when the connection is closed
	end       context.CancelFunc
	closed    atomic.Bool
	upgraded  atomic.Bool // no deadlines apply
	http2     atomic.Bool // counted in Bounds.HTTP2
	computing atomic.Bool // holds one of Server.handshakes
	serving   atomic.Int32
	awaiting  atomic.Int32 // heads of answers; at most one, except in HTTP/2, whose heads are bounded by connection
	unserved  atomic.Int64
	written   atomic.Int64 // when the write deadline was set, in Unix nanoseconds
	reading   atomic.Int64 // the read deadline, in Unix nanoseconds; 0: none
	moved     chan struct{}
}

// way connects to the server of a connection's requests.
type way func(context.Context) (net.Conn, error)

func newConn(s *Server, raw Conn) *conn {
	c := &conn{Conn: raw, s: s, to: raw.To(), moved: make(chan struct{}, 1)}
	c.to = netip.AddrPortFrom(c.to.Addr().Unmap(), c.to.Port())
	c.port = c.to.Port()
	c.life, c.end = context.WithCancel(context.Background())
	c.up = c.dial
	return c
}

// dial connects to the original destination of c.
func (c *conn) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return c.s.Dial(ctx, "tcp", c.to.String())
}

// bare returns the connection that the kernel can relay.
func (c *conn) bare() net.Conn {
	if u, ok := c.Conn.(interface{ NetConn() net.Conn }); ok {
		return u.NetConn()
	}
	return c.Conn
}

// receive reads from the network. It accounts for what it reads between requests.
func (c *conn) receive(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && c.serving.Load() == 0 && !c.upgraded.Load() && !c.hold(n) {
		return 0, errTooMuch
	}
	return n, err
}

// hold takes the memory that n bytes can need from the account, and reports whether
// that is within bounds.
func (c *conn) hold(n int) bool {
	read := int64(unservedWeight * n)
	within := c.s.Bounds.Unserved.Take(read)
	c.unserved.Add(read)
	if c.closed.Load() {
		c.forgive()
	}
	if !within {
		c.s.Bounds.Reached("unserved bytes")
	}
	return within
}

func (c *conn) forgive() {
	if c.unserved.Load() != 0 {
		c.s.Bounds.Unserved.Give(c.unserved.Swap(0))
	}
}

func (c *conn) Read(b []byte) (int, error) {
	if len(c.early) > 0 {
		n := copy(b, c.early)
		if c.early = c.early[n:]; len(c.early) == 0 {
			c.early = nil
		}
		return n, nil
	}
	n, err := c.receive(b)
	// While a request is served, net/http reads one byte to detect that the client has
	// disconnected. It takes a half-closed connection for a closed one.
	if err == io.EOF && len(b) == 1 && c.patient { //nolint:errorlint // as net/http
		err = c.wait()
	}
	return n, err
}

// wait blocks the read of a half-closed connection, so that its request is served to
// the end.
func (c *conn) wait() error {
	timer := time.NewTimer(halfClosed)
	defer timer.Stop()
	for {
		if at := c.reading.Load(); at != 0 && at <= time.Now().UnixNano() {
			return os.ErrDeadlineExceeded
		}
		select {
		case <-c.moved:
		case <-c.life.Done():
			return net.ErrClosed
		case <-timer.C:
			return io.EOF
		}
	}
}

func (c *conn) Write(b []byte) (int, error) {
	c.computed()
	if now := time.Now(); now.UnixNano()-c.written.Load() > int64(stall/4) && !c.upgraded.Load() {
		c.written.Store(now.UnixNano())
		_ = c.Conn.SetWriteDeadline(now.Add(stall))
	}
	return c.Conn.Write(b)
}

// The setters record the deadlines that net/http sets, for wait and Write.

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *conn) SetReadDeadline(t time.Time) error {
	at := int64(0)
	if !t.IsZero() {
		at = max(1, t.UnixNano())
	}
	c.reading.Store(at)
	err := c.Conn.SetReadDeadline(t)
	select {
	case c.moved <- struct{}{}:
	default:
	}
	return err
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.written.Store(0)
	if !t.IsZero() {
		c.written.Store(time.Now().UnixNano())
	}
	return c.Conn.SetWriteDeadline(t)
}

// compute waits for one of the slots in which handshakes are computed. The slot is
// given back with the first flight: the rest of the handshake waits for the client.
func (c *conn) compute(ctx context.Context) error {
	select {
	case c.s.handshakes <- struct{}{}:
		c.computing.Store(true)
		if c.closed.Load() {
			c.computed()
			return net.ErrClosed
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *conn) computed() {
	if c.computing.Load() && c.computing.CompareAndSwap(true, false) {
		<-c.s.handshakes
	}
}

// enter marks the start of a request, leave its end.
func (c *conn) enter() {
	c.serving.Add(1)
	c.forgive()
}

func (c *conn) leave() { c.serving.Add(-1) }

// takeHTTP2 takes c from the account of HTTP/2 connections, and reports whether c may
// speak HTTP/2.
func (c *conn) takeHTTP2() bool {
	if !c.s.Bounds.HTTP2.Take(1) {
		c.s.Bounds.HTTP2.Give(1)
		return false
	}
	c.http2.Store(true)
	if c.closed.Load() {
		c.leaveHTTP2()
	}
	return true
}

func (c *conn) leaveHTTP2() {
	if c.http2.Swap(false) {
		c.s.Bounds.HTTP2.Give(1)
	}
}

func (c *conn) Close() error {
	err := c.Conn.Close()
	if c.closed.Swap(true) {
		return err
	}
	c.end()
	c.computed()
	c.forgive()
	c.leaveHTTP2()
	c.s.conns.remove(c)
	c.s.Bounds.Open.Give(1)
	return err
}

// reset makes Close send a TCP reset.
func (c *conn) reset() {
	if l, ok := c.bare().(interface{ SetLinger(int) error }); ok {
		_ = l.SetLinger(0)
	}
}

// conns are the open connections.
type conns struct {
	mu    sync.Mutex
	open  map[*conn]struct{}
	empty chan struct{} // closed when the last connection is removed; nil if nothing waits
}

func (s *conns) add(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[*conn]struct{}{}
	}
	s.open[c] = struct{}{}
}

func (s *conns) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, c)
	if len(s.open) == 0 && s.empty != nil {
		close(s.empty)
		s.empty = nil
	}
}

// deserted waits until there are no open connections, or ctx is done.
func (s *conns) deserted(ctx context.Context) error {
	s.mu.Lock()
	if len(s.open) == 0 {
		s.mu.Unlock()
		return nil
	}
	if s.empty == nil {
		s.empty = make(chan struct{})
	}
	empty := s.empty
	s.mu.Unlock()
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *conns) cut() {
	s.mu.Lock()
	var all []*conn
	for c := range s.open {
		all = append(all, c)
	}
	s.mu.Unlock()
	for _, c := range all {
		_ = c.Close()
	}
}

func isTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }
