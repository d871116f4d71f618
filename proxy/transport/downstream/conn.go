package downstream

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
)

// ErrTooMuch is the error of reads that are above the bound of unserved bytes.
var ErrTooMuch = errors.New("too many bytes before a request or before the answer to it")

// Conn is a connection of a client, below TLS. The pod's accounts contain it until it is
// closed.
type Conn struct {
	net.Conn
	Tunnel bool
	// Upgraded means that neither deadlines nor the bound of unserved bytes apply.
	Upgraded atomic.Bool
	// Life is done when the connection is closed.
	Life context.Context
	// Next is served on the connection after the current request, in HTTP/1.1: see Server.Hand.
	Next net.Conn

	bytes     io.ReadWriter // of Conn
	conns     *Conns
	heads     *bounds.Account // of the memory of handshakes and heads
	share     *bounds.Share   // nil unless peers are counted
	end       context.CancelFunc
	http2     atomic.Bool // counted in Conns.HTTP2
	computing atomic.Bool // has a token in Conns.Handshakes
	tls13     atomic.Bool // a TLS handshake of that version has begun
	closed    atomic.Bool
	reset     atomic.Bool
	serving   atomic.Int32
	unserved  atomic.Int64
	deadline  atomic.Int64 // when the write deadline was set, in Unix nanoseconds; 0: there is none
}

// accepted returns the connection that types which embed it are made of.
func (c *Conn) accepted() *Conn { return c }

// Bare returns the connection that the kernel can relay.
func (c *Conn) Bare() net.Conn {
	if u, ok := c.Conn.(interface{ NetConn() net.Conn }); ok {
		return u.NetConn()
	}
	return c.Conn
}

// Compute waits for a turn to compute a handshake. The turn ends with the first flight:
// the rest of the handshake waits for the client.
func (c *Conn) Compute(ctx context.Context) error {
	select {
	case c.conns.Handshakes <- struct{}{}:
		c.computing.Store(true)
		if c.closed.Load() { // Close may have returned the turns before this one
			c.computed()
			return net.ErrClosed
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *Conn) computed() {
	if c.computing.Load() && c.computing.CompareAndSwap(true, false) {
		<-c.conns.Handshakes
	}
}

// configForClient returns a function that is called with each ClientHello. It waits for the
// connection's turn to compute, and returns http11 if the connection may not speak HTTP/2.
func configForClient(http11 *tls.Config) func(*tls.ClientHelloInfo) (*tls.Config, error) {
	return func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		c, ok := h.Conn.(*Conn)
		if !ok {
			return nil, nil
		}
		if err := c.Compute(h.Context()); err != nil {
			return nil, err
		}
		c.tls13.Store(slices.Contains(h.SupportedVersions, tls.VersionTLS13) && c.conns.Distrusted != nil)
		if slices.Contains(h.SupportedProtos, "h2") && !c.TakeHTTP2() {
			return http11, nil
		}
		return nil, nil
	}
}

// TakeHTTP2 reports whether the connection may speak HTTP/2, and accounts for it.
func (c *Conn) TakeHTTP2() bool {
	if !c.conns.HTTP2.Take(1) {
		c.conns.HTTP2.Give(1)
		return false
	}
	c.http2.Store(true)
	if c.closed.Load() {
		c.leaveHTTP2()
	}
	return true
}

func (c *Conn) leaveHTTP2() {
	if c.http2.Swap(false) {
		c.conns.HTTP2.Give(1)
	}
}

// Enter records the start of a request.
func (c *Conn) Enter() {
	c.Serving(1)
	c.Forgive()
}

// Serving adds n to the number of requests that are being served.
func (c *Conn) Serving(n int32) { c.serving.Add(n) }

// Hold accounts for the memory of n unserved bytes, and reports whether that is within
// bounds.
func (c *Conn) Hold(n int) bool {
	within := c.conns.hold(c.heads, n)
	c.unserved.Add(int64(UnservedWeight * n))
	if c.closed.Load() {
		c.Forgive()
	}
	return within
}

// Hold is Conn.Hold for bytes of no connection. The caller gives them back.
func (s *Conns) Hold(n int) bool { return s.hold(&s.Unserved, n) }

func (s *Conns) hold(heads *bounds.Account, n int) bool {
	within := heads.Take(int64(UnservedWeight * n))
	if !within {
		s.Reached("unserved bytes")
	}
	return within
}

// Forgive gives back what Hold took.
func (c *Conn) Forgive() {
	if c.unserved.Load() != 0 {
		c.heads.Give(c.unserved.Swap(0))
	}
}

// Read accounts for what it reads between requests.
func (c *Conn) Read(b []byte) (int, error) {
	n, err := c.bytes.Read(b)
	if n > 0 && c.serving.Load() == 0 && !c.Upgraded.Load() {
		if c.tls13.Load() && plainDistrust(b[:n]) {
			c.conns.Distrusted()
		}
		if !c.Hold(n) {
			return 0, ErrTooMuch
		}
	}
	return n, err
}

// Write gives up a client that has stopped reading.
func (c *Conn) Write(b []byte) (int, error) {
	c.computed()
	// Moving a deadline costs more than checking whether it is still far.
	if now := time.Now(); now.UnixNano()-c.deadline.Load() > int64(Stall/4) && !c.Upgraded.Load() {
		c.deadline.Store(now.UnixNano())
		_ = c.Conn.SetWriteDeadline(now.Add(Stall))
	}
	return c.bytes.Write(b)
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetWriteDeadline implements net.Conn. It records the deadline for Write.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	if t.IsZero() {
		c.deadline.Store(0)
	} else {
		c.deadline.Store(time.Now().UnixNano())
	}
	return c.Conn.SetWriteDeadline(t)
}

// Close implements net.Conn. The second call ends what the first one has left to the client, see
// linger.
func (c *Conn) Close() error {
	if c.closed.Swap(true) {
		return c.Conn.Close()
	}
	c.computed()
	c.Forgive()
	if c.share != nil {
		c.share.Close()
	}
	c.leaveHTTP2()
	c.end()
	if c.conns.Draining.Err() != nil && c.linger() {
		return nil
	}
	defer c.conns.remove(c)
	return c.Conn.Close()
}

// linger lets the client close the connection: it may not have read the GOAWAY yet. A request that it
// sends meanwhile would fail at a closed connection. Here it sees that the request is not served, and
// sends it again. It reports false if the connection cannot be closed so.
func (c *Conn) linger() bool {
	half, ok := c.Bare().(interface{ CloseWrite() error })
	if !ok || c.Tunnel || c.Upgraded.Load() || c.reset.Load() || half.CloseWrite() != nil {
		return false
	}
	_ = c.SetReadDeadline(time.Now().Add(lingerFor))
	go func() {
		defer c.conns.remove(c)
		_, _ = io.Copy(io.Discard, c.Conn)
		_ = c.Conn.Close()
	}()
	return true
}

// Reset makes Close send a TCP reset, which the client cannot take for a clean end.
func (c *Conn) Reset() {
	c.reset.Store(true)
	if l, ok := c.Bare().(interface{ SetLinger(sec int) error }); ok {
		_ = l.SetLinger(0)
	}
}
