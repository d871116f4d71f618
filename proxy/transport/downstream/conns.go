// Package downstream serves the clients of a pod over HTTP. It accounts for their connections, bounds what they keep
// in memory, gives up clients that stop reading, and ends connections:
//
//	server.go    Server: accepts, serves, drains and closes; the pod's clients, its egress and its webhook have one each
//	conns.go     the open connections of a server, and their bounds
//	conn.go      one connection, below TLS
//	distrust.go  clients that do not trust the server's certificate
package downstream

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/listen"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/concurrent"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/rawio"
)

// Bounds of the connections of one pod. They apply to accepted connections: Accept itself
// never waits, because the agent takes a listener that accepts as a sign of life.
const (
	// MaxConnections is what one pod may have open, if no other pod has as many.
	MaxConnections = 1024
	ownConnections = 32
	// maxHTTP2 bounds the connections that speak HTTP/2, because they keep bodies, and a
	// head besides those of the streams that are served.
	maxHTTP2 = 32
	ownHTTP2 = 4
	// MaxHandshakes is how many TLS handshakes are computed at once: a pod that does
	// nothing else must leave processor time to the others.
	MaxHandshakes = 4
	// MaxHeaderBytes is of one request. The apiserver allows 1 MiB; clients of
	// Kubernetes send two or three thousand bytes.
	MaxHeaderBytes = 128 << 10
	// MaxUnserved bounds what handshakes and heads take on connections that serve no
	// request. A byte of them can take UnservedWeight bytes of memory. An HTTP/2
	// connection that serves requests keeps one head more; maxHTTP2 bounds these.
	MaxUnserved    = 64 << 20
	OwnUnserved    = 4 << 20
	UnservedWeight = 16
	// ownPeer is what each peer has for itself, if peers are counted: room for a handshake and a
	// head of the usual size.
	ownPeer = 128 << 10

	// HeadTimeout bounds a TLS handshake and the head of a request.
	HeadTimeout = 10 * time.Second
	Idle        = 120 * time.Second
	// Stall is how long a client may stop reading, on a connection or an HTTP/2 stream.
	Stall = time.Minute
	// TunnelIdle is how long a tunnel may be silent in both directions. TCP keep-alives
	// detect peers that are gone; nothing in Kubernetes lets a stream be idle for longer
	// than four hours.
	TunnelIdle = 5 * time.Hour
	// lingerFor is how long a connection that ended in a takeover waits for its client to close it.
	lingerFor = 2 * time.Second
	// cutGrace is how long HTTP/2 connections that are cut may take to end after GOAWAY.
	// Package http2 itself waits a second.
	cutGrace = 2 * time.Second
)

// Pools are what the pods of a node share.
type Pools struct{ Open, HTTP2, Unserved *bounds.Pool }

// NewPools returns the pools of a node.
func NewPools() *Pools {
	return &Pools{
		bounds.NewPool(MaxConnections, ownConnections), bounds.NewPool(maxHTTP2, ownHTTP2),
		bounds.NewPool(MaxUnserved, OwnUnserved),
	}
}

// Conns are the open connections that the listeners of a pod accepted.
type Conns struct {
	// Open counts connections, HTTP2 those that speak HTTP/2, Unserved the memory of
	// handshakes and heads in bytes.
	Open, HTTP2, Unserved bounds.Account
	// Peers, if set, counts the memory of handshakes and heads instead of Unserved: clients may
	// be anybody, and one of them must not use up what another needs.
	Peers *bounds.Peers
	// Reached is called with the name of a bound that was reached.
	Reached func(bound string)
	// Distrusted is called for each client that does not trust the server's certificate; nil: not.
	Distrusted func()
	// Handshakes contains a token for each TLS handshake that is being computed.
	Handshakes chan struct{}
	// Draining is done after Stop.
	Draining context.Context

	stop      context.CancelFunc
	mu        sync.Mutex
	listeners []net.Listener
	open      concurrent.Set[*Conn]
	closed    chan struct{} // gets a token when a connection is closed
}

// Conns returns an empty set of connections with accounts from the pools.
func (p *Pools) Conns(reached func(bound string)) *Conns {
	s := &Conns{
		Open:       bounds.Account{Pool: p.Open, Own: ownConnections},
		HTTP2:      bounds.Account{Pool: p.HTTP2, Own: ownHTTP2},
		Unserved:   bounds.Account{Pool: p.Unserved, Own: OwnUnserved},
		Reached:    reached,
		Handshakes: make(chan struct{}, MaxHandshakes),
		closed:     make(chan struct{}, 1),
	}
	s.Draining, s.stop = context.WithCancel(context.Background())
	return s
}

// PerPeer divides the memory of handshakes and heads among the peers, and no longer among pods
// alone.
func (p *Pools) PerPeer() *bounds.Peers { return &bounds.Peers{Pool: p.Unserved, Own: ownPeer} }

// Listen makes Stop close l. After Stop it closes l at once.
func (s *Conns) Listen(l net.Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listeners = append(s.listeners, l); s.Draining.Err() != nil {
		_ = l.Close()
	}
}

// Stop closes the listeners.
func (s *Conns) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop()
	for _, l := range s.listeners {
		_ = l.Close()
	}
	s.listeners = nil
}

// Accept accounts for a connection that a listener accepted. Above the bound it closes
// the connection and returns nil. A tunnel serves no HTTP.
func (s *Conns) Accept(raw net.Conn, tunnel bool) *Conn {
	if !s.Open.Take(1) {
		s.Open.Give(1)
		_ = raw.Close()
		return nil
	}
	c := &Conn{Conn: raw, Tunnel: tunnel, bytes: raw, conns: s, heads: &s.Unserved}
	if tcp, ok := c.Bare().(*net.TCPConn); ok {
		c.bytes = rawio.New(tcp)
	}
	if s.Peers != nil {
		c.share = s.Peers.Open(listen.PeerOf(raw))
		c.heads = c.share.Of()
	}
	c.Life, c.end = context.WithCancel(context.Background())
	s.open.Add(c)
	return c
}

func (s *Conns) remove(c *Conn) {
	s.open.Remove(c)
	s.Open.Give(1)
	select {
	case s.closed <- struct{}{}:
	default:
	}
}

// List returns the open connections.
func (s *Conns) List() []*Conn { return s.open.List() }

// Wait waits until no connection is open, or ctx is done. Only one may wait at a time.
func (s *Conns) Wait(ctx context.Context) error {
	for len(s.List()) > 0 {
		select {
		case <-s.closed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
