package egress

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync/atomic"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// tls is look for a connection that begins with a ClientHello.
func (s *Server) tls(c *conn, h *hello) net.Conn {
	p, _ := s.Policy()
	asked := c.opaque(match.HTTP{Scheme: "https", Host: h.name, Port: c.target.port, Opaque: true})
	// Do not connect to the server if the rules refuse the request already.
	done := s.turn(p)
	decrypt := p.decrypts(asked...) && p.refuses(&flow{asked: asked, within: true}) == nil
	done()
	if decrypt {
		if down := s.decrypt(c, h); down != nil {
			return down
		}
	}
	s.tunnel(c, ProtocolTLS, asked)
	return nil
}

// opaque returns one, the visible target of an opaque connection, and a target for each
// other host of the CONNECTs around it. Rules must allow all of them.
func (c *conn) opaque(one match.HTTP) []match.HTTP {
	asked := []match.HTTP{one}
	for _, host := range c.target.via {
		if host != one.Host {
			asked = append(asked, match.HTTP{Scheme: "https", Host: host, Port: c.target.port, Opaque: true})
		}
	}
	return asked
}

// decrypt terminates the client's TLS and starts TLS with the server, in a protocol
// that both speak. It returns nil, and does nothing, if the client offers no protocol of
// HTTP or there is no certificate. c.leafless is then set: a request that a rule may
// deny is refused.
func (s *Server) decrypt(c *conn, h *hello) net.Conn {
	if s.Leaf == nil || h.name == "" {
		c.server.leafless = true
		return nil
	}
	offered := slices.DeleteFunc([]string{"h2", "http/1.1"}, func(p string) bool { return !slices.Contains(h.alpn, p) })
	if len(offered) == 0 && len(h.alpn) > 0 {
		c.server.leafless = true // the client offers no HTTP, but the server may speak it in spite of that
		return nil
	}
	ctx, cancel := context.WithTimeout(c.Life, leafTimeout)
	leaf, err := s.Leaf(ctx, h.name)
	cancel()
	if err != nil {
		c.server.leafless = true
		s.leafless.Do(func() { // rate-limited: the pod controls how often this happens
			s.Log.Warn("no certificate to decrypt a connection with: it is refused if a rule may deny its requests, else treated as opaque", "pod", s.Pod, "host", h.name, "error", err)
		})
		return nil
	}
	if slices.Contains(offered, "h2") && !c.TakeHTTP2() {
		offered = slices.DeleteFunc(offered, func(p string) bool { return p == "h2" })
	}
	c.target.scheme, c.target.protocol, c.target.host = "https", ProtocolHTTPS, h.name
	up, err := s.verified(c, offered)
	if err != nil {
		c.server.unverified = err
	} else {
		offered = offered[:0]
		if chosen := up.ConnectionState().NegotiatedProtocol; chosen != "" {
			offered = append(offered, chosen)
		} else if len(h.alpn) > 0 {
			offered = append(offered, "http/1.1")
		}
		c.server.transport = c.newTransport(false)
		first := c.first(up)
		c.server.transport.DialTLSContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			if up := first(); up != nil {
				return up, nil
			}
			return s.verified(c, offered)
		}
	}
	return tls.Server(c, &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: offered,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			return nil, c.Compute(hello.Context())
		},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return leaf, nil },
	})
}

// first returns a function that returns up on its first call and nil afterwards. If it is
// never called, up is closed with c.
func (c *conn) first(up net.Conn) func() net.Conn {
	var used atomic.Bool
	first := func() net.Conn {
		if used.Swap(true) {
			return nil
		}
		return up
	}
	context.AfterFunc(c.Life, func() {
		if up := first(); up != nil {
			_ = up.Close()
		}
	})
	return first
}

// verified connects to the server of c and verifies its certificate.
func (s *Server) verified(c *conn, protocols []string) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(c.Life, dialTimeout)
	defer cancel()
	raw, err := c.server.up(ctx)
	if err != nil {
		return nil, err
	}
	up, err := s.handshake(ctx, answering{raw, c}, &tls.Config{
		ServerName: c.target.host, RootCAs: s.Roots, MinVersion: tls.VersionTLS12, NextProtos: protocols,
	})
	if err != nil {
		_ = raw.Close()
		return nil, fmt.Errorf("TLS handshake with the server of %s: %w", c.target.host, err)
	}
	return up, nil
}

// newTransport returns a transport that connects with c.up, whatever the target of a
// request is. http2 means HTTP/2 without TLS.
func (c *conn) newTransport(http2 bool) *http.Transport {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(!http2)
	protocols.SetHTTP2(c.target.scheme == "https")
	protocols.SetUnencryptedHTTP2(http2)
	up := c.server.up
	t := &http.Transport{
		Proxy: forwarded,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			raw, err := up(ctx)
			if err != nil {
				return nil, err
			}
			return answering{raw, c}, nil
		},
		Protocols:              protocols,
		ForceAttemptHTTP2:      c.target.scheme == "https",
		DisableCompression:     true,
		ExpectContinueTimeout:  expectTimeout,
		MaxResponseHeaderBytes: maxAnswerHead,
		IdleConnTimeout:        downstream.Idle,
		// Bound what is buffered for a slow client: the account of HTTP/2 connections
		// assumes these sizes, and one connection to the server.
		HTTP2: &http.HTTP2Config{
			StrictMaxConcurrentRequests:   true,
			WriteByteTimeout:              downstream.Stall,
			MaxReceiveBufferPerStream:     128 << 10,
			MaxReceiveBufferPerConnection: 512 << 10,
		},
	}
	context.AfterFunc(c.Life, t.CloseIdleConnections)
	return t
}
