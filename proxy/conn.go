package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of what one pod can make the proxy hold. All are imposed on what was
// accepted: Accept itself never waits, for the host tells from it that the
// proxy lives.
const (
	// maxConnections are one pod's, if no other has as many (pool).
	maxConnections = 1024
	ownConnections = 32
	// maxHTTP2 connections hold bodies and a head beside what streams are served;
	// whoever opens more is served HTTP/1.1.
	maxHTTP2   = 32
	ownHTTP2   = 4
	maxStreams = 512 // of one HTTP/2 connection
	// maxHandshakes is how many may be computed at once: a pod that does nothing
	// else must leave processor time to the others.
	maxHandshakes = 4
	// maxHeaderBytes is of one request. The apiserver takes 1 MiB; clients of
	// Kubernetes send two or three thousand.
	maxHeaderBytes = 128 << 10
	// maxUnserved is what handshakes and heads may hold on the connections that
	// serve no request: a byte of them can become unservedWeight. An HTTP/2
	// connection that serves some holds one head more, and maxHTTP2 says how many.
	maxUnserved    = 64 << 20
	ownUnserved    = 4 << 20
	unservedWeight = 16

	headerTimeout  = 10 * time.Second // the TLS handshake too
	downstreamIdle = 120 * time.Second
	// stall is how long a client may read nothing of what is sent to it, on a
	// connection or an HTTP/2 stream.
	stall = time.Minute

	receivePerStream     = 64 << 10
	receivePerConnection = 256 << 10
	maxFrame             = 64 << 10
	// sendBuffer is the kernel's, of each connection. Left to itself it grows to
	// megabytes for a client that does not read.
	sendBuffer = 128 << 10
)

var errTooMuch = errors.New("too much was sent before a request")

// listener accepts the connections of a pod that it terminates. Those beyond the
// bounds it closes, and those of a passthrough it hands to a tunnel.
type listener struct {
	net.Listener
	pod *Pod
	// Close is called by whoever ends the pod and by http.Server.
	once sync.Once
	err  error
}

func (l *listener) Close() error {
	l.once.Do(func() { l.err = l.Listener.Close() })
	return l.err
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		p := l.pod
		if !p.open.Take(1) {
			p.open.Give(1)
			_ = raw.Close()
			p.bound("connections")
			continue
		}
		if b, ok := raw.(interface{ SetWriteBuffer(int) error }); ok {
			_ = b.SetWriteBuffer(sendBuffer)
		}
		if pol := p.policy.Load(); pol != nil && pol.passthrough {
			go p.tunnel(raw, pol)
			continue
		}
		return p.conns.add(&conn{Conn: raw, pod: p, gone: make(chan struct{})}), nil
	}
}

// conns are a pod's open connections but for tunnels.
type conns struct {
	mu   sync.Mutex
	open map[*conn]struct{}
}

func (s *conns) add(c *conn) *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[*conn]struct{}{}
	}
	s.open[c] = struct{}{}
	return c
}

func (s *conns) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, c)
	close(c.gone)
}

func (s *conns) list() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.open))
}

// bound counts and tells that the pod has reached a bound.
func (p *Pod) bound(what string) {
	p.workload().Bounded(p.server.metrics, what)
	p.notify(ReasonBound, "pod %s has reached the proxy's bound on %s; what is beyond it is refused", p.id, what)
}

// conn is a connection of the pod below TLS, in the pod's accounts until it is
// closed.
type conn struct {
	net.Conn
	pod  *Pod
	gone chan struct{} // closed when nothing comes from it any more

	http2     atomic.Bool // has one of the maxHTTP2
	computing atomic.Bool // has one of the maxHandshakes
	closed    atomic.Bool
	upgraded  atomic.Bool // no deadlines hold
	serving   atomic.Int32
	unserved  atomic.Int64 // of the pod's
	deadline  atomic.Int64 // of writes was set then, Unix nanoseconds; 0: there is none
}

type connKey struct{}

// connContext lets a request find its connection.
func connContext(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c.(*tls.Conn).NetConn())
}

func connOf(r *http.Request) *conn {
	c, _ := r.Context().Value(connKey{}).(*conn)
	return c
}

// hello is called with each ClientHello. It waits for its turn to compute.
func (p *Pod) hello(h *tls.ClientHelloInfo) (*tls.Config, error) {
	c, ok := h.Conn.(*conn)
	if !ok {
		return nil, nil
	}
	select {
	case p.handshakes <- struct{}{}:
		c.computing.Store(true)
		if c.closed.Load() { // and gave back what it had then
			c.computed()
			return nil, net.ErrClosed
		}
	case <-h.Context().Done():
		return nil, h.Context().Err()
	}
	if !slices.Contains(h.SupportedProtos, "h2") {
		return nil, nil
	}
	if !p.http2.Take(1) {
		p.http2.Give(1)
		return p.http11, nil
	}
	c.http2.Store(true)
	if c.closed.Load() {
		c.leaveHTTP2()
	}
	return nil, nil
}

// computed gives the turn to the next handshake: what is left of this one waits
// for the client.
func (c *conn) computed() {
	if c.computing.Load() && c.computing.CompareAndSwap(true, false) {
		<-c.pod.handshakes
	}
}

// enter and leave surround each request.
func (c *conn) enter() {
	c.serving.Add(1)
	c.forgive()
}

func (c *conn) leave() { c.serving.Add(-1) }

func (c *conn) forgive() {
	if n := c.unserved.Load(); n != 0 {
		c.pod.unserved.Give(c.unserved.Swap(0))
	}
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && c.serving.Load() == 0 {
		read := int64(unservedWeight * n)
		within := c.pod.unserved.Take(read)
		c.unserved.Add(read)
		if c.closed.Load() {
			c.forgive()
		}
		if !within {
			c.pod.bound("unserved bytes")
			return 0, errTooMuch
		}
	}
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	c.computed()
	// Moving a deadline costs more than looking whether it is still far.
	if now := time.Now(); now.UnixNano()-c.deadline.Load() > int64(stall/4) && !c.upgraded.Load() {
		c.deadline.Store(now.UnixNano())
		_ = c.Conn.SetWriteDeadline(now.Add(stall))
	}
	return c.Conn.Write(b)
}

// SetDeadline and SetWriteDeadline note that another deadline is in force than
// that of Write.
func (c *conn) SetDeadline(t time.Time) error {
	c.note(t)
	return c.Conn.SetDeadline(t)
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.note(t)
	return c.Conn.SetWriteDeadline(t)
}

func (c *conn) note(t time.Time) {
	if t.IsZero() {
		c.deadline.Store(0)
	} else {
		c.deadline.Store(time.Now().UnixNano())
	}
}

func (c *conn) Close() error {
	err := c.Conn.Close()
	if c.closed.Swap(true) {
		return err
	}
	c.computed()
	c.forgive()
	c.leaveHTTP2()
	c.pod.conns.remove(c)
	c.pod.left()
	return err
}

// reset closes the connection in a way that the client cannot take for an end.
func (c *conn) reset() {
	if l, ok := c.Conn.(interface{ SetLinger(sec int) error }); ok {
		_ = l.SetLinger(0)
	}
	_ = c.Close()
}

func (c *conn) leaveHTTP2() {
	if c.http2.Swap(false) {
		c.pod.http2.Give(1)
	}
}

// left notes that a connection is gone.
func (p *Pod) left() {
	p.open.Give(1)
	if p.open.Taken() == 0 {
		select {
		case p.empty <- struct{}{}:
		default:
		}
	}
}
