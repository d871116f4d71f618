// Package http2 serves HTTP/2 (RFC 9113) to clients, in place of the server of net/http. A
// connection has one goroutine that reads, and handlers append frames to one buffer. A handler that finds nobody
// writing writes what is in it, so that frames of several streams, and the HEADERS and DATA of one, share a record of
// TLS.
//
//	server.go    Server, and what it bounds
//	conn.go      a connection: its handlers, its end
//	receive.go   frames that arrive
//	head.go      header blocks, and the requests that they are
//	names.go     names of fields, and the encoding of those of responses
//	output.go    frames that leave
//	stream.go    a stream, and the body of its request
//	response.go  its response
//	context.go   its context
//	nethttp.go   handlers of net/http
//	frame.go     the encoding of frames
//
// There is neither server push, nor extended CONNECT, nor priorities.
package http2

import (
	"context"
	"crypto/tls"
	"errors"
	"log"
	"net"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/concurrent"
)

// Bounds of a connection.
const (
	// maxBlockFrames bounds the frames of one header block.
	maxBlockFrames = 256
	// maxOut is how many bytes of frames wait for the connection before handlers wait.
	maxOut = 64 << 10
	// maxReplies bounds the bytes of replies to frames of a client that does not read.
	maxReplies = 64 << 10
	// futileRate and futileBurst bound the frames that advance no request, per second and at once: PING, SETTINGS,
	// PRIORITY, empty DATA, RST_STREAM and updates of windows beyond updatesPerFrame for each frame of DATA.
	futileRate      = 100
	futileBurst     = 10000
	updatesPerFrame = 64
	// idleWorkers is how many goroutines of handlers are kept for the next streams: their stacks have grown.
	idleWorkers = 2
	// awayFor is how long a client may take to close a connection after GOAWAY.
	awayFor = time.Second
	// lingerFor is how long a client may go on to send a body that its handler has not read, up to a window of it.
	lingerFor = time.Second
	// prefaceTimeout is how long a client may take for the preface.
	prefaceTimeout = 10 * time.Second
)

// Config is of a Server. All fields are required.
type Config struct {
	// Handler serves a stream, in a goroutine of its own. It may be of net/http: see HTTP.
	Handler func(*Stream)
	// MaxStreams is of one connection. Further ones are refused. Twice as many handlers may run: those of streams that
	// the client reset do not count as streams.
	MaxStreams int
	// StreamWindow and ConnWindow are how many bytes of bodies are received before handlers read them. They are at
	// least 64 KiB.
	StreamWindow, ConnWindow int
	// MaxHeader is the size of a header block, decoded: each field has 32 bytes besides its name and value.
	MaxHeader int
	// Idle is how long a connection without streams stays open.
	Idle time.Duration
	// Stall returns how long a handler may wait in one Write until its stream is reset.
	Stall func() time.Duration
	// ErrorLog gets panics of handlers, and what ends connections that break the protocol.
	ErrorLog *log.Logger
}

// Server serves connections of HTTP/2. Its methods are safe for concurrent use.
type Server struct {
	Config

	conns concurrent.Set[*conn]
}

// NewServer returns a Server without connections.
func NewServer(c Config) *Server { return &Server{Config: c} }

// Serve serves a connection until it ends, and closes it. Requests have the values of ctx, and state, which is nil
// without TLS. prefaced means that the first line of the preface, up to SETTINGS, was read before.
func (s *Server) Serve(ctx context.Context, nc net.Conn, state *tls.ConnectionState, prefaced bool) {
	c := newConn(ctx, s, nc, state)
	s.conns.Add(c)
	defer s.conns.Remove(c)
	if err := c.serve(prefaced); errors.As(err, new(*connError)) {
		s.ErrorLog.Printf("http2: serving %s: %v", c.remote, err)
	}
}

// Shutdown has all connections end with GOAWAY after their last request.
func (s *Server) Shutdown() {
	for _, c := range s.conns.List() {
		go c.shutdown()
	}
}
