package http2

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"runtime"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

var errClosed = errors.New("HTTP/2 connection closed")

// conn is a connection of a client.
type conn struct {
	server *Server
	nc     net.Conn
	base   context.Context // has the values of those of streams
	state  *tls.ConnectionState
	remote string
	in     input // of the goroutine that reads
	jobs   chan *Stream

	mu      sync.Mutex
	err     error // after its end
	streams map[uint32]*Stream
	running int // handlers
	waiting int // goroutines that wait for jobs
	last    uint32
	ended   closedStreams
	away    bool      // GOAWAY was sent
	quiet   time.Time // when the last stream ended
	idle    *time.Timer
	window  inflow
	out     output
}

// input is the state of the goroutine that reads.
type input struct {
	frames frameReader
	block  block
	futile *rate.Limiter
}

func newConn(ctx context.Context, s *Server, nc net.Conn, state *tls.ConnectionState) *conn {
	c := &conn{
		server: s, nc: nc, base: ctx, state: state, remote: nc.RemoteAddr().String(),
		jobs:    make(chan *Stream, idleWorkers),
		streams: map[uint32]*Stream{},
		window:  newInflow(s.ConnWindow),
		quiet:   time.Now(),
	}
	c.in = input{
		frames: newFrameReader(nc),
		futile: rate.NewLimiter(futileRate, futileBurst),
	}
	c.in.block.init(s.MaxHeader)
	c.out.init()
	return c
}

// serve reads frames until the connection ends, and returns why it did.
func (c *conn) serve(prefaced bool) error {
	c.mu.Lock()
	c.idle = time.AfterFunc(c.server.Idle, c.checkIdle)
	c.settings()
	c.mu.Unlock()
	var err error
	if !prefaced {
		err = c.preface()
	}
	if err == nil {
		err = c.firstSettings()
	}
	for err == nil {
		var f frame
		if f, err = c.in.frames.next(); err != nil {
			break
		}
		if err = c.receive(&f); err == nil {
			continue
		}
		if reset, ok := errors.AsType[*streamError](err); ok {
			err = c.resetStream(reset)
		}
	}
	if fatal := (*connError)(nil); errors.As(err, &fatal) {
		c.refuse(fatal)
	}
	c.close(err)
	return err
}

// preface reads the preface of the client.
func (c *conn) preface() error {
	_ = c.nc.SetReadDeadline(time.Now().Add(prefaceTimeout))
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	got, err := c.in.frames.Peek(len(preface))
	if string(got) != preface[:len(got)] {
		return protocolError("invalid preface")
	}
	if err != nil {
		return err
	}
	_, _ = c.in.frames.Discard(len(preface))
	return nil
}

// firstSettings reads the SETTINGS that follow the preface.
func (c *conn) firstSettings() error {
	_ = c.nc.SetReadDeadline(time.Now().Add(prefaceTimeout))
	f, err := c.in.frames.next()
	if err != nil {
		return err
	}
	_ = c.nc.SetReadDeadline(time.Time{})
	if f.kind != typeSettings || f.has(flagAck) {
		return protocolError("the preface has no SETTINGS")
	}
	return c.receive(&f)
}

// refuse ends a connection with GOAWAY, and lets the client read that.
func (c *conn) refuse(e *connError) {
	c.mu.Lock()
	c.out.b = appendGoAway(c.out.open(), c.last, e.code)
	c.away, c.out.closing = true, true
	c.flush()
	c.mu.Unlock()
	_ = c.nc.SetReadDeadline(time.Now().Add(awayFor))
	_, _ = io.Copy(io.Discard, c.nc)
}

// close ends a connection and all of its streams. It can wait for the client.
func (c *conn) close(err error) {
	if c.fail(err) {
		_ = c.nc.Close()
	}
}

// fail ends all streams of a connection. It reports false if that was done before.
func (c *conn) fail(err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return false
	}
	c.err = errClosed
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
	}
	c.idle.Stop()
	for _, s := range c.streams {
		s.fail(c.err)
	}
	clear(c.streams)
	close(c.jobs)
	return true
}

// shutdown sends GOAWAY. The connection ends when it has no more streams.
func (c *conn) shutdown() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.goAway()
	c.flush()
}

// goAway is shutdown for callers that have c.mu, and flush.
func (c *conn) goAway() {
	if c.away || c.err != nil {
		return
	}
	c.away = true
	c.out.b = appendGoAway(c.out.open(), c.last, codeNo)
	c.leave()
}

// leave ends a connection after GOAWAY if it has no streams.
func (c *conn) leave() {
	if c.away && len(c.streams) == 0 {
		c.idle.Reset(awayFor)
	}
}

// checkIdle ends a connection that had no streams for some time.
func (c *conn) checkIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch left := c.server.Idle - time.Since(c.quiet); {
	case c.err != nil:
	case len(c.streams) > 0:
		c.idle.Reset(c.server.Idle)
	case c.away:
		go c.close(nil)
	case left > 0:
		c.idle.Reset(left)
	default:
		c.goAway()
		c.flush()
	}
}

// start has a handler serve s. The caller has c.mu.
func (c *conn) start(s *Stream) {
	c.running++
	if c.waiting > 0 {
		c.waiting--
		c.jobs <- s // it has room for each goroutine that waits
		return
	}
	go c.work(s)
}

// work serves s, and further streams as long as not too many goroutines wait for them.
func (c *conn) work(s *Stream) {
	for ok := true; ok; s, ok = <-c.jobs {
		c.handle(s)
		if !c.over(s) {
			return
		}
	}
}

// over ends a stream whose handler has returned. It reports whether the goroutine is to wait for the next one.
func (c *conn) over(s *Stream) (wait bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running--
	s.finish()
	c.flush()
	if wait = c.err == nil && c.waiting < idleWorkers; wait {
		c.waiting++
	}
	return wait
}

// handle calls the handler.
func (c *conn) handle(s *Stream) {
	defer s.ctx.cancel()
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		s.broken = true
		if v != http.ErrAbortHandler { //nolint:errorlint // a panic's value, compared as net/http does
			trace := make([]byte, 16<<10)
			trace = trace[:runtime.Stack(trace, false)]
			c.server.ErrorLog.Printf("http2: panic serving %s: %v\n%s", c.remote, v, trace)
		}
	}()
	c.server.Handler(s)
}

// table is the size of the table of HPACK of requests: the initial value.
const table = 4096

// output is what a connection sends. The mutex of the connection guards it.
type output struct {
	b       []byte  // frames that wait
	pooled  *[]byte // of b; nil: there is none
	batch   int     // how often b was taken
	replies int     // bytes of b that reply to frames
	writing bool    // somebody writes
	closing bool    // nothing follows b
	waiting []*Stream
	window  int64  // of the connection
	initial int64  // of new streams
	data    int    // updates of windows that frames of DATA have paid for
	head    []byte // of a header block
	emptied bool   // the client knows that the table of HPACK is empty
}
