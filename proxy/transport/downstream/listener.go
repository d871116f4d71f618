package downstream

import (
	"net"
	"sync"
)

// sendBuffer is the kernel's buffer of each connection, in bytes. By default it grows to
// megabytes for a client that does not read.
const sendBuffer = 128 << 10

// listener accepts connections within the bounds of a pod. It closes those above them.
type listener struct {
	net.Listener
	conns  *Conns
	bound  string // on connections
	tunnel func() (serve func(*Conn))
	close  func() error // once: its error would make http.Server.Shutdown fail
}

// Bounded returns a listener of connections within the bounds, which Stop closes. bound
// names the bound on connections. tunnel is called for each connection. If it returns a
// function, that function serves the connection, which Accept does not return.
func (s *Conns) Bounded(l net.Listener, bound string, tunnel func() (serve func(*Conn))) net.Listener {
	own := &listener{l, s, bound, tunnel, sync.OnceValue(l.Close)}
	s.Listen(own)
	return own
}

func (l *listener) Close() error { return l.close() }

func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		serve := l.tunnel()
		c := l.conns.Accept(raw, serve != nil)
		if c == nil {
			l.conns.Reached(l.bound)
			continue
		}
		if b, ok := c.Bare().(interface{ SetWriteBuffer(int) error }); ok {
			_ = b.SetWriteBuffer(sendBuffer)
		}
		if serve == nil {
			return c, nil
		}
		go serve(c)
	}
}
