package egress

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// tls is look at a connection that begins with a ClientHello.
func (s *Server) tls(c *conn, h *hello) net.Conn {
	p, _ := s.Policy()
	asked := c.opaque(match.HTTP{Scheme: "https", Host: h.name, Port: c.port, Opaque: true})
	// The server hears nothing of what is refused already.
	if p.decrypts(asked...) && p.refuses(&flow{asked: asked, within: true}) == nil {
		if down := s.decrypt(c, h); down != nil {
			return down
		}
	}
	s.tunnel(c, ProtocolTLS, asked)
	return nil
}

// opaque is what is asked on a connection of which one is seen, and the hosts that a
// proxy was asked for it.
func (c *conn) opaque(one match.HTTP) []match.HTTP {
	asked := []match.HTTP{one}
	for _, host := range c.via {
		if host != one.Host {
			asked = append(asked, match.HTTP{Scheme: "https", Host: host, Port: c.port, Opaque: true})
		}
	}
	return asked
}

// decrypt ends TLS with the client and begins it with the server, in the protocol that
// both speak. Nil: nothing was done, for the client would not take it, or there is
// nothing to do it with: then what may be denied is.
func (s *Server) decrypt(c *conn, h *hello) net.Conn {
	if s.Leaf == nil || h.name == "" {
		c.leafless = true
		return nil
	}
	offered := []string{"h2", "http/1.1"}
	offered = slices.DeleteFunc(offered, func(p string) bool { return !slices.Contains(h.alpn, p) })
	if len(offered) == 0 && len(h.alpn) > 0 {
		c.leafless = true // it says that it is not HTTP, to a server that may not care
		return nil
	}
	ctx, cancel := context.WithTimeout(c.life, leafTimeout)
	leaf, err := s.Leaf(ctx, h.name)
	cancel()
	if err != nil {
		c.leafless = true
		s.leafless.Do(func() { // the pod chooses how many
			s.Log.Warn("no certificate to decrypt by: the connection is refused if a rule may deny what it asks, else decided as one that cannot be seen", "pod", s.Pod, "host", h.name, "error", err)
		})
		return nil
	}
	if slices.Contains(offered, "h2") && !c.takeHTTP2() {
		offered = slices.DeleteFunc(offered, func(p string) bool { return p == "h2" })
	}
	c.scheme, c.protocol, c.host = "https", ProtocolHTTPS, h.name
	up, err := s.verified(c, offered)
	if err != nil {
		c.unverified = err
	} else {
		offered = offered[:0]
		if chosen := up.ConnectionState().NegotiatedProtocol; chosen != "" {
			offered = append(offered, chosen)
		} else if len(h.alpn) > 0 {
			offered = append(offered, "http/1.1")
		}
		c.transport = c.newTransport(false)
		first := once(up)
		c.transport.DialTLSContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			if up := first(); up != nil {
				return up, nil
			}
			return s.verified(c, offered)
		}
		context.AfterFunc(c.life, func() { // before it is anybody's
			if up := first(); up != nil {
				_ = up.Close()
			}
		})
	}
	return tls.Server(c, &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: offered,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			return nil, c.compute(hello.Context())
		},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return leaf, nil },
	})
}

// once gives one thing away once.
func once[T any](v *T) func() *T {
	var mu sync.Mutex
	return func() *T {
		mu.Lock()
		defer mu.Unlock()
		out := v
		v = nil
		return out
	}
}

// verified connects to the server that c's client asks for.
func (s *Server) verified(c *conn, protocols []string) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(c.life, dialTimeout)
	defer cancel()
	raw, err := c.up(ctx)
	if err != nil {
		return nil, err
	}
	up, err := s.handshake(ctx, answering{raw, c}, &tls.Config{
		ServerName: c.host, RootCAs: s.Roots, MinVersion: tls.VersionTLS12, NextProtos: protocols,
	})
	if err != nil {
		_ = raw.Close()
		return nil, fmt.Errorf("the server of %s: %w", c.host, err)
	}
	return up, nil
}

// newTransport goes c's way, whatever a request says. http2 is without TLS.
func (c *conn) newTransport(http2 bool) *http.Transport {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(!http2)
	protocols.SetHTTP2(c.scheme == "https")
	protocols.SetUnencryptedHTTP2(http2)
	up := c.up
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
		ForceAttemptHTTP2:      c.scheme == "https",
		DisableCompression:     true,
		ExpectContinueTimeout:  expectTimeout,
		MaxResponseHeaderBytes: maxAnswerHead,
		IdleConnTimeout:        idle,
		// Of what a client does not read no more is held than the account of HTTP/2
		// connections counts with, and on one connection.
		HTTP2: &http.HTTP2Config{
			StrictMaxConcurrentRequests:   true,
			MaxReceiveBufferPerStream:     128 << 10,
			MaxReceiveBufferPerConnection: 512 << 10,
		},
	}
	context.AfterFunc(c.life, t.CloseIdleConnections)
	return t
}
