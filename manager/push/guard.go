package push

import (
	"context"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/ctrlmesh/ctrlmesh/internal/listen"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

const (
	// maxConnsPerPeer allows an agent, the one that replaces it, and connections
	// that broke without the manager's notice.
	maxConnsPerPeer = 16
	// maxUnauthenticated bounds the connections without a valid token. Together
	// with maxUnreviewed it bounds what they make the manager store.
	maxUnauthenticated = 256
	// maxUnreviewed is how many bytes are read of a connection before a token was
	// reviewed: room for the handshake and the first calls. The rest waits in the
	// peer's kernel.
	maxUnreviewed = 64 << 10
	// authenticateWithin is when a connection without a valid token is closed.
	authenticateWithin = 20 * time.Second
	// maxHeaders bounds the headers of a call, the token among them.
	maxHeaders = 16 << 10
	// maxIdle is when a connection without a call is closed.
	maxIdle = 2 * time.Minute
)

// guard bounds a listener's connections: those of one address, those without a
// valid token, and what is read of the latter.
func guard(l net.Listener) net.Listener {
	return guarded{listen.Limit(l, listen.Bounds{
		Total: maxUnauthenticated, PerPeer: maxConnsPerPeer, Wait: true,
		Refused: func(r listen.Refusal) { metrics.ConnectionsRefused.WithLabelValues("push", string(r.Bound)).Inc() },
	})}
}

type guarded struct{ net.Listener }

// Accept implements net.Listener.
func (l guarded) Accept() (net.Conn, error) {
	inner, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return newGuardedConn(inner), nil
}

// guardedConn reads no more than maxUnreviewed bytes until it is trusted, and is
// closed if that takes too long.
type guardedConn struct {
	net.Conn
	unreviewed int64 // bytes that may be read yet; only Read uses it
	deadline   *time.Timer

	trustOnce, closeOnce sync.Once
	trusted, closed      chan struct{}
}

func newGuardedConn(inner net.Conn) *guardedConn {
	c := &guardedConn{Conn: inner, unreviewed: maxUnreviewed, trusted: make(chan struct{}), closed: make(chan struct{})}
	c.deadline = time.AfterFunc(authenticateWithin, func() {
		if !c.isTrusted() {
			_ = c.abort()
		}
	})
	return c
}

// Read implements net.Conn.
func (c *guardedConn) Read(p []byte) (int, error) {
	if c.isTrusted() {
		return c.Conn.Read(p)
	}
	if c.unreviewed <= 0 {
		select {
		case <-c.trusted:
			return c.Conn.Read(p)
		case <-c.closed:
			return 0, net.ErrClosed
		}
	}
	n, err := c.Conn.Read(p[:min(int64(len(p)), c.unreviewed)])
	c.unreviewed -= int64(n)
	return n, err
}

// Close implements net.Conn.
func (c *guardedConn) Close() error {
	c.deadline.Stop()
	return c.abort()
}

func (c *guardedConn) abort() error {
	c.closeOnce.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// trust lifts the bounds on a connection whose peer has authenticated.
func (c *guardedConn) trust() {
	c.trustOnce.Do(func() {
		c.deadline.Stop()
		close(c.trusted)
		listen.Trust(c.Conn)
	})
}

func (c *guardedConn) isTrusted() bool {
	select {
	case <-c.trusted:
		return true
	default:
		return false
	}
}

// guardedTLS is TLS that lets a call find its guardedConn.
type guardedTLS struct {
	credentials.TransportCredentials
}

// ServerHandshake implements credentials.TransportCredentials.
func (g guardedTLS) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := g.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return conn, info, err
	}
	tlsInfo, isTLS := info.(credentials.TLSInfo)
	c, isGuarded := raw.(*guardedConn)
	if !isTLS || !isGuarded {
		return conn, info, nil
	}
	return conn, guardedInfo{tlsInfo, c}, nil
}

// Clone implements credentials.TransportCredentials.
func (g guardedTLS) Clone() credentials.TransportCredentials {
	return guardedTLS{g.TransportCredentials.Clone()}
}

type guardedInfo struct {
	credentials.TLSInfo
	conn *guardedConn
}

// trustPeer lifts the bounds on the connection of a call that has authenticated.
func trustPeer(ctx context.Context) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return
	}
	if info, ok := p.AuthInfo.(guardedInfo); ok {
		info.conn.trust()
	}
}
