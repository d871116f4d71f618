package http2

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

var (
	errReset   = errors.New("HTTP/2 stream reset by the client")
	errStalled = errors.New("the client of an HTTP/2 stream stopped reading")
	errOver    = errors.New("HTTP/2 stream used after its handler has returned")
)

// Stream is a request and its response. Request, Forget, Last, Respond and Trailer are for the goroutine of its handler,
// all others for any.
// The mutex of the connection guards it, except for what only the handler uses.
type Stream struct {
	c       *conn
	id      uint32
	ctx     streamContext
	req     Request
	broken  bool      // the handler panicked
	changed sync.Cond // the stream, or what it waits for
	waits   bool      // it is in output.waiting
	err     error     // the stream ended
	over    bool      // the handler has returned, and its response is in the output
	// lingering ends the stream if the client does not end its request.
	lingering deadline
	window    int64 // of the response
	body      body
	resp      response
}

// newStream returns the stream of a header block; nil if the request is malformed.
func (c *conn) newStream(b *block) *Stream {
	s := &Stream{c: c, id: b.stream, ctx: streamContext{base: c.base}, window: c.out.initial}
	if b.trailer || b.request(&s.req) != nil {
		return nil
	}
	s.changed.L = &c.mu
	s.body = body{s: s, window: newInflow(c.server.StreamWindow), whole: b.end, declared: s.req.Length, announced: s.req.Header.Has("Trailer")}
	if !b.end && httpguts.HeaderValuesContainsToken(s.req.Header.Values("Expect"), "100-continue") {
		s.req.Header.Drop("Expect")
		s.body.expected = true
	}
	return s
}

// Context returns a context that is done when the stream ends.
func (s *Stream) Context() context.Context { return &s.ctx }

// Request returns the head of the request.
func (s *Stream) Request() *Request { return &s.req }

// Forget frees the head of the request, except for the method.
func (s *Stream) Forget() { s.req = Request{Method: s.req.Method} }

// Body returns the body of the request.
func (s *Stream) Body() io.ReadCloser { return &s.body }

// TLS returns the state of the connection; nil without TLS.
func (s *Stream) TLS() *tls.ConnectionState { return s.c.state }

// fail has all calls of the handler fail.
func (s *Stream) fail(err error) {
	s.err = err
	s.ctx.cancel()
	s.body.buf, s.body.off = nil, 0
	s.lingering.stop()
	s.changed.Broadcast()
}

// drop ends a stream that one side has reset.
func (s *Stream) drop(err error) {
	s.c.consume(nil, s.body.unread())
	s.fail(err)
	s.remove(true)
}

// reset ends a stream with RST_STREAM.
func (s *Stream) reset(c code, err error) {
	if s.err == nil {
		s.drop(err)
		s.c.out.b = appendReset(s.c.out.open(), s.id, c)
		s.c.leave()
	}
}

func (s *Stream) remove(reset bool) {
	c := s.c
	delete(c.streams, s.id)
	s.lingering.stop()
	c.ended.add(s.id, reset)
	c.quiet = time.Now()
}

// finish ends a stream whose handler has returned.
func (s *Stream) finish() {
	s.body.deadline.stop()
	switch {
	case s.err != nil: // it has ended
		return
	case s.broken && !s.resp.ended:
		s.reset(codeInternal, errOver)
		return
	}
	if s.resp.finish(s); s.err != nil {
		return
	}
	s.body.closed = true
	s.c.consume(nil, s.body.unread())
	s.fail(errOver)
	if s.over = true; s.body.whole {
		s.end()
	} else {
		s.lingering.set(s, time.Now().Add(lingerFor), func() {
			s.refuseBody()
			s.c.flush()
		})
	}
}

// end removes a stream whose response and request are over.
func (s *Stream) end() {
	s.remove(false)
	s.c.leave()
}

// refuseBody asks the client to send no more of a body. That is not done at once: the rest is often on its way, and
// there are clients, curl among them, that take it for a failure.
func (s *Stream) refuseBody() {
	s.c.out.b = appendReset(s.c.out.open(), s.id, codeNo)
	s.remove(true)
	s.c.leave()
}

// receiveTrailer ends the body of a request.
func (s *Stream) receiveTrailer(b *block) error {
	if s.body.whole {
		return &streamError{s.id, codeStreamClosed}
	}
	if !b.end || !b.trailer || b.invalid || b.large {
		return &streamError{s.id, codeProtocol}
	}
	if s.body.announced { // else nobody reads it
		s.body.trailer = slices.Clone(b.fields)
	}
	return s.body.finish()
}

// inflow is a window of what the client may send.
type inflow struct{ left, read, size int }

func newInflow(size int) inflow { return inflow{left: size, size: size} }

// receive reports whether the client may send n bytes.
func (w *inflow) receive(n int) bool {
	w.left -= n
	return w.left >= 0
}

// consume returns by how much the window is to be opened, once it is enough to say so.
func (w *inflow) consume(n int) int {
	if w.read += n; w.read < w.size/4 {
		return 0
	}
	more := w.read
	w.left += more
	w.read = 0
	return more
}

// consume opens windows for n bytes that were read, or that nobody will read. It appends WINDOW_UPDATE.
func (c *conn) consume(s *Stream, n int) {
	if n == 0 {
		return
	}
	if more := c.window.consume(n); more > 0 {
		c.out.b = appendWindowUpdate(c.out.open(), 0, more)
	}
	if s != nil && !s.body.whole {
		if more := s.body.window.consume(n); more > 0 {
			c.out.b = appendWindowUpdate(c.out.open(), s.id, more)
		}
	}
}

// body is the body of a request. The mutex of the connection guards it.
type body struct {
	s        *Stream
	window   inflow
	buf      []byte
	off      int   // bytes of buf that were read
	declared int64 // -1: not
	received int64
	whole    bool // nothing follows
	closed   bool // by the handler
	expected bool // the client waits for 100
	late     bool // the deadline has passed
	deadline deadline
	// announced says that a trailer was, and trailer are its fields.
	announced bool
	trailer   header.Fields
}

func (b *body) unread() int { return len(b.buf) - b.off }

// append adds DATA.
func (b *body) append(p []byte) error {
	b.received += int64(len(p))
	if b.declared >= 0 && b.received > b.declared {
		return &streamError{b.s.id, codeProtocol}
	}
	if b.closed {
		b.s.c.consume(nil, len(p))
		if b.s.over && b.window.left == 0 {
			b.s.refuseBody()
		}
		return nil
	}
	if b.off > 0 && len(b.buf)+len(p) > cap(b.buf) { // the window bounds what is unread
		b.buf, b.off = b.buf[:copy(b.buf, b.buf[b.off:])], 0
	}
	b.buf = append(b.buf, p...)
	b.s.changed.Broadcast()
	return nil
}

// finish records that nothing follows.
func (b *body) finish() error {
	if b.declared >= 0 && b.received != b.declared {
		return &streamError{b.s.id, codeProtocol}
	}
	b.whole = true
	b.s.changed.Broadcast()
	if b.s.over {
		b.s.end()
	}
	return nil
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	c := b.s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if b.expected {
		b.expected = false
		b.s.inform(http.StatusContinue, nil)
		c.flush()
	}
	for b.unread() == 0 {
		switch {
		case b.closed:
			return 0, http.ErrBodyReadAfterClose
		case b.s.err != nil:
			return 0, b.s.err
		case b.whole:
			return 0, io.EOF
		case b.late:
			return 0, os.ErrDeadlineExceeded
		}
		b.s.changed.Wait()
	}
	n := copy(p, b.buf[b.off:])
	if b.off += n; b.off == len(b.buf) {
		b.buf, b.off = b.buf[:0], 0
	}
	c.consume(b.s, n)
	c.flush()
	return n, nil
}

// takeTrailer returns the fields that followed the body.
func (b *body) takeTrailer() header.Fields {
	b.s.c.mu.Lock()
	defer b.s.c.mu.Unlock()
	trailer := b.trailer
	b.trailer = nil
	return trailer
}

// Close implements io.Closer. What arrives of the body later is dropped.
func (b *body) Close() error {
	c := b.s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	n := b.unread()
	b.buf, b.off = nil, 0
	c.consume(b.s, n)
	b.s.changed.Broadcast()
	c.flush()
	return nil
}

// deadline is a timer that may not exist.
type deadline struct{ timer *time.Timer }

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

// set has f be called at t, with the mutex of s; never if t is zero.
func (d *deadline) set(s *Stream, t time.Time, f func()) {
	d.stop()
	if t.IsZero() {
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(time.Until(t), func() {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		if d.timer == timer {
			f()
		}
	})
	d.timer = timer
}
