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
	server *Server
	close  func() error // once: its error would make http.Server.Shutdown fail
}

// bounded returns a listener of the connections that serve HTTP, which Stop closes.
func (s *Server) bounded(l net.Listener) net.Listener {
	own := &listener{l, s, sync.OnceValue(l.Close)}
	s.Conns.Listen(own)
	return own
}

func (l *listener) Close() error { return l.close() }

func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		var serve func(*Conn)
		if l.server.Tunnel != nil {
			serve = l.server.Tunnel()
		}
		c := l.server.Conns.Accept(raw, serve != nil)
		if c == nil {
			l.server.Refused()
			continue
		}
		if b, ok := c.Bare().(interface{ SetWriteBuffer(int) error }); ok {
			_ = b.SetWriteBuffer(sendBuffer)
		}
		if serve == nil {
			serve = l.server.Sniff
		}
		if serve == nil {
			return c, nil
		}
		go serve(c)
	}
}
