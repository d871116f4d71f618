package egress

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"

	"github.com/ctrlmesh/ctrlmesh/internal/listen"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// maxAnswerHead is the maximum size of the head of an answer, informational answers
// before it included.
const maxAnswerHead = 64 << 10

// answering is a connection to a server. Bytes that may be the head of an answer are
// accounted for like those of a request: the server may collude with the pod.
type answering struct {
	net.Conn
	c *conn
}

func (a answering) Read(b []byte) (int, error) {
	n, err := a.Conn.Read(b)
	if n > 0 && a.c.server.awaiting.Load() > 0 && !a.c.Hold(n) {
		return 0, downstream.ErrTooMuch
	}
	return n, err
}

// await marks the start of the wait for the head of an answer, awaited its end.
func (c *conn) await() { c.server.awaiting.Add(1) }

func (c *conn) awaited() {
	c.server.awaiting.Add(-1)
	c.Forgive()
}

// headed is called when the head of the answer has arrived, or will not arrive.
func (x *request) headed() {
	if x.awaits {
		x.awaits = false
		x.c.awaited()
	}
}

// hold takes n bytes and the memory of a head from the account of requests, and reports
// whether the total is within bounds.
func (x *request) hold(n int64, head http.Header) bool {
	n += listen.HeadWeight(head, 2)
	x.held += n
	within := x.s.Held.Take(n)
	if !within {
		x.s.Conns.Reached("egress requests")
	}
	return within
}

// handshaking is a connection to a server during the TLS handshake. Computing takes one
// of the pod's handshake slots, which is given back while it waits for the server. The
// bytes read are accounted for.
type handshaking struct {
	net.Conn
	s    *Server
	read int64
	over bool
}

func (h *handshaking) Read(b []byte) (int, error) {
	if h.over {
		return h.Conn.Read(b)
	}
	<-h.s.Conns.Handshakes
	n, err := h.Conn.Read(b)
	h.s.Conns.Handshakes <- struct{}{}
	h.read += int64(n)
	if !h.s.Conns.Hold(n) || h.read > maxHello {
		return 0, downstream.ErrTooMuch
	}
	return n, err
}

// handshake does the TLS handshake with a server.
func (s *Server) handshake(ctx context.Context, raw net.Conn, config *tls.Config) (*tls.Conn, error) {
	select {
	case s.Conns.Handshakes <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	h := &handshaking{Conn: raw, s: s}
	defer func() {
		<-s.Conns.Handshakes
		s.Conns.Unserved.Give(downstream.UnservedWeight * h.read)
		h.over = true
	}()
	up := tls.Client(h, config)
	return up, up.HandshakeContext(ctx)
}
