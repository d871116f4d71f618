package review

import (
	"net"
	"sync"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// listener accepts connections within the pod's bounds. It passes them to the application
// unread while there is no certificate.
type listener struct {
	net.Listener
	server *Server
	close  func() error // once
}

func newListener(l net.Listener, s *Server) *listener {
	return &listener{Listener: l, server: s, close: sync.OnceValue(l.Close)}
}

func (l *listener) Close() error { return l.close() }

func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		tunnel := !l.server.certificate.usable()
		var c *downstream.Conn
		if c = l.server.Conns.Accept(raw, tunnel); c == nil {
			l.server.Conns.Reached("webhook connections")
			continue
		}
		if !tunnel {
			return c, nil
		}
		go l.server.tunnel(c)
	}
}
