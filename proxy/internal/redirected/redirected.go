// Package redirected stands in for the redirection of connections in tests.
package redirected

import (
	"net"
	"net/netip"
)

// Listener accepts connections as if their client had connected to another address.
type Listener struct {
	net.Listener
	To netip.AddrPort
}

// Accept waits for the next connection.
func (l Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return conn{c.(*net.TCPConn), l.To}, nil
}

type conn struct {
	*net.TCPConn
	to netip.AddrPort
}

func (c conn) To() netip.AddrPort { return c.to }
func (c conn) NetConn() net.Conn  { return c.TCPConn }
