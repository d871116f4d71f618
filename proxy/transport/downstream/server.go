package downstream

import (
	"context"
	"crypto/tls"
	"log"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/http2"
)

// Config is what a Server serves, and how. Fields are required unless noted.
type Config struct {
	// Conns account for the connections. Refused is called for each that is above the bound on their number.
	Conns   *Conns
	Refused func()
	Log     *slog.Logger
	// MaxStreams, StreamWindow and ConnWindow are of HTTP/2: see package http2.
	MaxStreams, StreamWindow, ConnWindow int
	// TLS, if set, has connections be of TLS, in HTTP/1.1 or 2. Else they are of HTTP/1.1 or unencrypted HTTP/2.
	TLS *tls.Config
	// Handler serves requests. It finds the connection of a request by Of.
	Handler http.Handler
	// Streams, if set, serves those of HTTP/2 instead.
	Streams func(*http2.Stream)
	// Tunnel, if set, is called for each connection. If it returns a function, the connection is a tunnel, which
	// that function serves.
	Tunnel func() (serve func(*Conn))
	// Sniff, if set, serves each connection, and may pass it to Hand. It must not have a Tunnel.
	Sniff func(*Conn)
}

// Server serves the clients of one pod over HTTP, within the bounds of its Conns, and ends their connections. Its
// methods are safe for concurrent use.
type Server struct {
	Config
	// Stall is how long the client of an HTTP/2 stream may stop reading. It may be changed before requests are served.
	Stall time.Duration

	// ErrorLog gets the errors of connections.
	ErrorLog *log.Logger

	// http is made when it is first needed. Most pods have servers that never serve: of webhooks, and of other
	// hosts' connections.
	http   func() *http.Server
	start  sync.Once
	handed *handed // nil without Sniff
}

// NewServer returns a Server that serves nothing until Serve is called.
func NewServer(c Config) *Server {
	s := &Server{Config: c, Stall: Stall, ErrorLog: slog.NewLogLogger(c.Log.Handler(), slog.LevelDebug)}
	if c.Conns.Distrusted != nil {
		s.ErrorLog = watchHandshakes(s.ErrorLog, c.Conns.Distrusted)
	}
	s.http = sync.OnceValue(s.newHTTP)
	if c.Sniff != nil {
		s.handed = &handed{conns: make(chan net.Conn), done: make(chan struct{})}
	}
	return s
}

func (s *Server) newHTTP() *http.Server {
	server := &http.Server{
		Handler:                      s,
		ReadHeaderTimeout:            HeadTimeout,
		IdleTimeout:                  Idle,
		MaxHeaderBytes:               MaxHeaderBytes,
		DisableGeneralOptionsHandler: true, // net/http must not answer OPTIONS *
		ErrorLog:                     s.ErrorLog,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if t, ok := c.(*tls.Conn); ok {
				c = t.NetConn()
			}
			return context.WithValue(ctx, connKey{}, c)
		},
	}
	s.serveHTTP2(server)
	if s.TLS == nil {
		server.Protocols = &http.Protocols{}
		server.Protocols.SetHTTP1(true)
		server.Protocols.SetHTTP2(true)
		server.Protocols.SetUnencryptedHTTP2(true)
		return server
	}
	http11 := s.TLS.Clone()
	http11.MinVersion, http11.NextProtos = tls.VersionTLS12, []string{"http/1.1"}
	server.TLSConfig = http11.Clone()
	server.TLSConfig.NextProtos = []string{"h2", "http/1.1"}
	server.TLSConfig.GetConfigForClient = configForClient(http11)
	return server
}

// serveHTTP2 has package http2 serve the connections of HTTP/2.
func (s *Server) serveHTTP2(server *http.Server) {
	handler := http2.HTTP(s)
	if s.Streams != nil {
		handler = s.serveStream
	}
	over2 := http2.NewServer(http2.Config{
		Handler: handler, MaxStreams: s.MaxStreams, StreamWindow: s.StreamWindow, ConnWindow: s.ConnWindow,
		MaxHeader: MaxHeaderBytes, Idle: Idle, Stall: func() time.Duration { return s.Stall }, ErrorLog: s.ErrorLog,
	})
	server.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){
		"h2": func(_ *http.Server, c *tls.Conn, h http.Handler) {
			state := c.ConnectionState()
			over2.Serve(baseOf(h), c, &state, false)
		},
		// net/http's name for HTTP/2 without TLS, whose preface it has read.
		"unencrypted_http2": func(_ *http.Server, c *tls.Conn, h http.Handler) {
			if plain, ok := c.NetConn().(interface{ UnencryptedNetConn() net.Conn }); ok {
				over2.Serve(baseOf(h), plain.UnencryptedNetConn(), nil, true)
			}
		},
	}
	server.RegisterOnShutdown(over2.Shutdown)
}

// baseOf returns the context that net/http has made for a connection.
func baseOf(h http.Handler) context.Context {
	return h.(interface{ BaseContext() context.Context }).BaseContext()
}

// Serve accepts connections on l, which it closes. It returns nil after Stop, and may be called for several
// listeners.
func (s *Server) Serve(l net.Listener) error {
	if s.handed != nil {
		s.start.Do(func() { go func() { _ = s.http().Serve(s.handed) }() })
	}
	l = s.bounded(l)
	var err error
	if s.TLS != nil {
		err = s.http().ServeTLS(l, "", "")
	} else {
		err = s.http().Serve(l)
	}
	if s.Draining() {
		return nil
	}
	return err
}

// Hand has requests be read from a connection that Sniff got, or one of TLS on top of it. It closes the connection if
// the server is closed.
func (s *Server) Hand(c net.Conn) {
	select {
	case s.handed.conns <- c:
	case <-s.handed.done:
		_ = c.Close()
	}
}

// serveStream serves a request in HTTP/2.
func (s *Server) serveStream(st *http2.Stream) {
	c := connOf(st.Context())
	c.Enter()
	defer c.Serving(-1)
	if s.Draining() {
		st.Last()
	}
	s.Streams(st)
}

// ServeHTTP implements http.Handler, for net/http and package http2.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := connOf(r.Context())
	c.Enter()
	defer func() {
		c.Serving(-1)
		if next := c.Next; next != nil {
			c.Next = nil
			s.Hand(next)
		}
	}()
	if s.Draining() {
		w.Header()["Connection"] = []string{"close"}
	}
	s.Handler.ServeHTTP(w, r)
}

// Draining reports whether Stop was called.
func (s *Server) Draining() bool { return s.Conns.Draining.Err() != nil }

// Stop closes the listeners: no further connections are accepted.
func (s *Server) Stop() { s.Conns.Stop() }

// Drain waits, after Stop, until all connections have ended. Those of HTTP end after their next request. When ctx is
// done, Drain cuts those that are left, and returns its error.
func (s *Server) Drain(ctx context.Context) error {
	// Not http.Server.Shutdown, which drops requests that arrive on HTTP/1 connections.
	err := s.Conns.Wait(ctx)
	if err != nil {
		s.Cut()
	}
	s.Close()
	return err
}

// Shutdown closes idle connections, after Stop, and waits for requests in progress until ctx is done. Those of HTTP/2
// end with GOAWAY.
func (s *Server) Shutdown(ctx context.Context) error { return s.http().Shutdown(ctx) }

// Cut ends all connections that serve HTTP: those of HTTP/2 with GOAWAY.
func (s *Server) Cut() {
	ctx, cancel := context.WithTimeout(context.Background(), cutGrace)
	defer cancel()
	_ = s.http().Shutdown(ctx)
	_ = s.http().Close()
}

// Close closes all listeners and connections.
func (s *Server) Close() {
	s.Stop()
	_ = s.http().Close()
	for _, c := range s.Conns.List() {
		_ = c.Close()
	}
}

// CloseTunnels closes the connections that are tunnels.
func (s *Server) CloseTunnels() {
	for _, c := range s.Conns.List() {
		if c.Tunnel {
			_ = c.Close()
		}
	}
}

type connKey struct{}

// Of returns the connection of the request with a context, below TLS. It returns the zero C
// if that is not a C.
func Of[C any](ctx context.Context) C {
	c, _ := ctx.Value(connKey{}).(C)
	return c
}

func connOf(ctx context.Context) *Conn { return Of[interface{ accepted() *Conn }](ctx).accepted() }

// handed is a net.Listener of connections that another listener accepted.
type handed struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (l *handed) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *handed) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *handed) Addr() net.Addr { return &net.TCPAddr{} }
