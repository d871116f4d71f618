// Package listen bounds the connections of a listener, per peer and in total.
package listen

import (
	"net"
	"net/netip"
	"slices"
	"sync"
)

// Bounds of a listener's open connections.
type Bounds struct {
	// Total is how many connections are open at once, without those that were
	// passed to Trust. Zero or less means no bound.
	Total int
	// PerPeer is how many connections one address has. Zero or less means no bound.
	PerPeer int
	// Replace closes the oldest connection where otherwise the latest is closed, or
	// the new one refused. It suits short exchanges: no number of connections that
	// stall keeps out one that does not, even from the same address.
	Replace bool
	// Wait lets the only connection of a peer wait where otherwise it is refused, because each of
	// the peers that reach the total has one, too. It suits connections that soon end, or are passed to
	// Trust: peers that come all at once are served in the order of arrival. Those that came
	// later wait in the kernel.
	Wait bool
	// Refused, if set, is called for each connection that a bound closes. It must
	// not block and may be called from any goroutine.
	Refused func(Refusal)
}

// Refusal says which bound closed a connection, and whose connection it was.
type Refusal struct {
	// Peer is the zero Addr for peers without an IP address.
	Peer  netip.Addr
	Bound Bound
}

// Bound names one of the bounds.
type Bound string

// The bounds.
const (
	PerPeer Bound = "per-peer"
	Total   Bound = "total"
)

// Limit returns a listener that accepts from l within bounds. A connection above
// its peer's bound is closed at once, unless Replace is set. If the total is reached, the latest
// connection of the peer that has the most is closed, unless the new one is that
// peer's: a peer with many connections never keeps out one with few.
func Limit(l net.Listener, bounds Bounds) net.Listener {
	limited := &listener{Listener: l, bounds: bounds, peers: map[netip.Addr]*peer{}, counting: map[netip.Addr]*peer{}}
	limited.room.L = &limited.mu
	return limited
}

// Trust excludes a connection of a limited listener from the total: its peer has
// authenticated, so that others neither wait for it nor close it. It still counts
// for its peer.
func Trust(c net.Conn) {
	if c, ok := c.(*conn); ok {
		c.listener.mu.Lock()
		defer c.listener.mu.Unlock()
		c.listener.discount(c)
	}
}

type listener struct {
	net.Listener
	bounds Bounds

	mu       sync.Mutex
	room     sync.Cond // signalled when total falls, and when closed
	closed   bool
	total    int // connections that count for Bounds.Total
	accepted uint64
	peers    map[netip.Addr]*peer
	counting map[netip.Addr]*peer // those with connections that count for Bounds.Total
}

// peer is one address with open connections.
type peer struct {
	open    int
	counted []*conn // those that count for Bounds.Total, oldest first
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	for {
		accepted, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: accepted, peer: PeerOf(accepted), listener: l}
		closed, bound := l.count(c)
		if closed != nil {
			_ = closed.Close()
			if l.bounds.Refused != nil {
				l.bounds.Refused(Refusal{Peer: closed.peer, Bound: bound})
			}
		}
		if closed != c {
			return c, nil
		}
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.room.Broadcast()
	return l.Listener.Close()
}

// count counts a connection and returns the one to close for it, if a bound is
// reached, which may be c itself.
func (l *listener) count(c *conn) (closed *conn, bound Bound) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.bounds.Wait && !l.closed && l.full() && l.counting[c.peer] == nil && l.ofLargest(1) == nil {
		l.room.Wait()
	}
	var own peer
	if p := l.peers[c.peer]; p != nil {
		own = *p
	}
	switch {
	case l.bounds.PerPeer > 0 && c.peer.IsValid() && own.open >= l.bounds.PerPeer:
		bound = PerPeer
		if l.bounds.Replace && len(own.counted) > 0 {
			closed = own.counted[0]
		}
	case l.full():
		bound = Total
		closed = l.ofLargest(len(own.counted) + 1)
	default:
		l.add(c)
		return nil, ""
	}
	if closed == nil {
		return c, bound
	}
	l.remove(closed)
	l.add(c)
	return closed, bound
}

// full reports whether the total is reached.
func (l *listener) full() bool { return l.bounds.Total > 0 && l.total >= l.bounds.Total }

// add begins the count of a connection. It is called with mu locked.
func (l *listener) add(c *conn) {
	p := l.peers[c.peer]
	if p == nil {
		p = &peer{}
		l.peers[c.peer] = p
	}
	l.accepted++
	c.open, c.counted, c.number = true, true, l.accepted
	p.open++
	p.counted = append(p.counted, c)
	l.counting[c.peer] = p
	l.total++
}

// ofLargest returns the connection to close of the peer with the most counted
// connections. If no peer has more than that many, it is the oldest of all with
// Replace, else nil.
func (l *listener) ofLargest(than int) (closed *conn) {
	var oldest *conn
	for _, p := range l.counting {
		n := len(p.counted)
		if n > than {
			than, closed = n, p.counted[n-1]
			if l.bounds.Replace {
				closed = p.counted[0]
			}
		}
		if l.bounds.Replace && (oldest == nil || p.counted[0].number < oldest.number) {
			oldest = p.counted[0]
		}
	}
	if closed == nil {
		return oldest
	}
	return closed
}

// remove ends the count of a connection. It is called with mu locked.
func (l *listener) remove(c *conn) {
	if !c.open {
		return
	}
	l.discount(c)
	c.open = false
	p := l.peers[c.peer]
	if p.open--; p.open == 0 {
		delete(l.peers, c.peer)
	}
}

// discount ends the count of a connection for the total. It is called with mu locked.
func (l *listener) discount(c *conn) {
	if !c.counted {
		return
	}
	c.counted = false
	l.total--
	l.room.Signal()
	p := l.peers[c.peer]
	if p.counted = slices.DeleteFunc(p.counted, func(o *conn) bool { return o == c }); len(p.counted) == 0 {
		delete(l.counting, c.peer)
	}
}

// conn is a connection that counts until it is closed.
type conn struct {
	net.Conn
	peer     netip.Addr
	listener *listener
	// open and counted are guarded by listener.mu.
	open, counted bool
	number        uint64 // in the order of acceptance
}

// NetConn returns the connection as it was accepted. Closing that one directly
// leaves it counted.
func (c *conn) NetConn() net.Conn { return c.Conn }

// Close implements net.Conn.
func (c *conn) Close() error {
	c.listener.mu.Lock()
	c.listener.remove(c)
	c.listener.mu.Unlock()
	return c.Conn.Close()
}

// PeerOf returns the address of a connection's peer, the zero Addr if it has none.
func PeerOf(c net.Conn) netip.Addr {
	remote, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return remote.AddrPort().Addr().Unmap().WithZone("")
}
