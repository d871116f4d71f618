package upstream

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

const (
	maxIdle = 64
	// idleTimeout is below the 90 s after which the apiserver closes idle connections,
	// so that no request is sent on a half-closed connection.
	idleTimeout = 55 * time.Second
	// inlineBody is the maximum size of a body that is sent in one TLS record with its
	// head, in bytes.
	inlineBody = 12 << 10
)

// Request is a request to the apiserver. Header must contain no hop-by-hop fields.
type Request struct {
	Method string
	Target string // escaped path and raw query
	Host   string
	Header header.Fields
	Body   io.Reader // nil: none
	Length int64     // of Body in bytes; -1: unknown
	// Sent is when the request was sent, after the connection was established.
	Sent time.Time
}

func (r *Request) hasBody() bool { return r.Body != nil && r.Length != 0 }

// replayable reports whether r may be sent twice: it changes nothing, and has no body.
func (r *Request) replayable() bool {
	return !r.hasBody() && (r.Method == http.MethodGet || r.Method == http.MethodHead)
}

// errStale means that a kept connection was closed before a byte of the answer arrived.
var errStale = errors.New("the connection was closed while idle")

// pool keeps HTTP/1.1 connections.
type pool struct {
	connect func(context.Context) (*tls.Conn, error)

	mu     sync.Mutex
	idle   []*conn // oldest first
	closed bool
	sweep  *time.Timer
}

type conn struct {
	*tls.Conn
	pool  *pool
	br    *bufio.Reader
	since time.Time // idle since
	kept  bool      // has served a request
	cut   func()    // abort
}

var (
	readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4<<10) }}
	heads   = sync.Pool{New: func() any { b := make([]byte, 0, 4<<10); return &b }}
)

// roundTrip sends r and returns the head of the answer, whose Body must be closed. The
// connection is closed as soon as ctx is done.
func (p *pool) roundTrip(ctx context.Context, r *Request) (Response, error) {
	for {
		c, err := p.get(ctx, !r.replayable())
		if err != nil {
			return Response{}, err
		}
		r.Sent = time.Now()
		resp, err := c.roundTrip(ctx, r)
		if errors.Is(err, errStale) && r.replayable() && ctx.Err() == nil {
			continue // each turn uses up one kept connection
		}
		if err != nil && ctx.Err() != nil {
			err = ctx.Err()
		}
		return resp, err
	}
}

// get returns a connection. With sure, a kept connection is probed before, because the
// request cannot be sent again.
func (p *pool) get(ctx context.Context, sure bool) (*conn, error) {
	for {
		p.mu.Lock()
		n := len(p.idle)
		if n == 0 || p.closed {
			p.mu.Unlock()
			break
		}
		c := p.idle[n-1]
		p.idle[n-1] = nil
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		if time.Since(c.since) < idleTimeout && (!sure || alive(c.NetConn())) {
			return c, nil
		}
		c.abort()
	}
	raw, err := p.connect(ctx)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, pool: p}
	c.cut = c.abort
	return c, nil
}

func (p *pool) put(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle) >= maxIdle {
		c.abort()
		return
	}
	c.since, c.kept = time.Now(), true
	p.idle = append(p.idle, c)
	if p.sweep == nil {
		p.sweep = time.AfterFunc(idleTimeout, p.expire)
	}
}

// expire closes the connections that have been idle for too long. It runs again while any
// are left.
func (p *pool) expire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.idle) > 0 && time.Since(p.idle[0].since) >= idleTimeout {
		p.idle[0].abort()
		p.idle = p.idle[1:]
	}
	p.sweep = nil
	if len(p.idle) > 0 && !p.closed {
		p.sweep = time.AfterFunc(idleTimeout-time.Since(p.idle[0].since), p.expire)
	}
}

// close closes the idle connections and keeps no more. Those in use end with their
// request.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, c := range p.idle {
		c.abort()
	}
	p.idle = nil
	if p.sweep != nil {
		p.sweep.Stop()
	}
}

// abort closes the socket below TLS: a close_notify could block.
func (c *conn) abort() { _ = c.NetConn().Close() }

// afterFunc is context.AfterFunc without its allocations if ctx has that method.
func afterFunc(ctx context.Context, f func()) (stop func() bool) {
	if c, ok := ctx.(interface {
		AfterFunc(f func()) (stop func() bool)
	}); ok {
		return c.AfterFunc(f)
	}
	return context.AfterFunc(ctx, f)
}

func (c *conn) roundTrip(ctx context.Context, r *Request) (Response, error) {
	stop := afterFunc(ctx, c.cut)
	fail := func(err error) (Response, error) {
		stop()
		c.abort()
		c.release()
		return Response{}, err
	}
	c.br = readers.Get().(*bufio.Reader)
	c.br.Reset(c)

	writeErr := c.send(r)
	if _, ok := errors.AsType[*BodyError](writeErr); ok {
		return fail(writeErr)
	}
	// The apiserver may answer before it has read the body. Its answer takes precedence
	// over the write error.
	if _, err := c.br.Peek(1); err != nil {
		if writeErr != nil {
			err = writeErr // a read after it returns EOF for any cause
		}
		if c.kept && !IsTimeout(err) {
			err = fmt.Errorf("%w: %w", errStale, err)
		}
		return fail(err)
	}
	for {
		m, err := readMessage(c.br, r.Method)
		if err != nil {
			return fail(err)
		}
		if m.status == http.StatusSwitchingProtocols {
			return fail(errors.New("the apiserver switched protocols without a request to upgrade"))
		}
		if m.status < 200 {
			continue
		}
		b := &body{content: m.content, conn: c, stop: stop, keep: !m.close && writeErr == nil}
		if m.content.empty() {
			b.end()
		}
		return m.response(b), nil
	}
}

func (c *conn) release() {
	if c.br != nil {
		c.br.Reset(nil)
		readers.Put(c.br)
		c.br = nil
	}
}

// body returns the connection to the pool after it was read to its end.
type body struct {
	content
	conn *conn
	stop func() bool
	keep bool
	done bool
}

func (b *body) Read(p []byte) (int, error) {
	if b.done {
		return 0, io.EOF
	}
	n, err := b.content.Read(p)
	if err == io.EOF { //nolint:errorlint // a wrapped one is a body cut short
		b.end()
	}
	return n, err
}

func (b *body) end() {
	b.done = true
	idle := b.stop() && b.keep && b.conn.br.Buffered() == 0
	b.conn.release()
	if idle {
		b.conn.pool.put(b.conn)
	} else {
		b.conn.abort()
	}
}

// Close closes the connection if the body was not read to its end.
func (b *body) Close() error {
	if !b.done {
		b.done = true
		b.stop()
		b.conn.abort()
		b.conn.release()
	}
	return nil
}

// BodyError is a failure to read the client's body.
type BodyError struct{ Err error }

func (e *BodyError) Error() string { return e.Err.Error() }
func (e *BodyError) Unwrap() error { return e.Err }

// send writes r, head and body.
func (c *conn) send(r *Request) error {
	pooled := heads.Get().(*[]byte)
	buf := appendHead((*pooled)[:0], r)
	defer func() {
		if cap(buf) <= 64<<10 {
			*pooled = buf[:0]
			heads.Put(pooled)
		}
	}()
	if !r.hasBody() {
		_, err := c.Write(buf)
		return err
	}
	if r.Length < 0 {
		return c.sendChunked(r, buf)
	}
	left := r.Length
	if left <= inlineBody {
		n := len(buf)
		buf = append(buf, make([]byte, left)...)
		if _, err := io.ReadFull(r.Body, buf[n:]); err != nil {
			return &BodyError{err}
		}
		_, err := c.Write(buf)
		return err
	}
	if _, err := c.Write(buf); err != nil {
		return err
	}
	return c.copy(c.Conn, io.LimitReader(r.Body, left), left)
}

func (c *conn) sendChunked(r *Request, head []byte) error {
	if _, err := c.Write(head); err != nil {
		return err
	}
	w := bufio.NewWriterSize(c.Conn, 16<<10)
	chunks := httputil.NewChunkedWriter(w)
	if err := c.copy(chunks, r.Body, -1); err != nil {
		return err
	}
	if err := chunks.Close(); err != nil {
		return err
	}
	if _, err := w.WriteString("\r\n"); err != nil {
		return err
	}
	return w.Flush()
}

// copy copies a body. Failures to read it are BodyErrors.
func (c *conn) copy(w io.Writer, r io.Reader, want int64) error {
	buf := Buffer()
	defer buf.Free()
	sent, err := io.CopyBuffer(w, source{r}, buf.B)
	if err == nil && want >= 0 && sent != want {
		return &BodyError{io.ErrUnexpectedEOF}
	}
	return err
}

func appendHead(b []byte, r *Request) []byte {
	b = append(b, r.Method...)
	b = append(b, ' ')
	b = append(b, r.Target...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, r.Host...)
	b = append(b, "\r\n"...)
	for i := range r.Header {
		f := &r.Header[i]
		switch f.Name {
		case "Host", "Content-Length", "Transfer-Encoding":
			continue
		}
		b = append(b, f.Name...)
		b = append(b, ": "...)
		b = append(b, f.Value...)
		b = append(b, "\r\n"...)
	}
	switch {
	case r.hasBody() && r.Length < 0:
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	case r.hasBody(), r.Method == http.MethodPost, r.Method == http.MethodPut, r.Method == http.MethodPatch:
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, max(r.Length, 0), 10)
		b = append(b, "\r\n"...)
	}
	return append(b, "\r\n"...)
}

// Ended reports whether a request failed with err because the apiserver closed the
// connection, by FIN or RST. It is false if the proxy closed it: the apiserver may not have
// noticed yet.
func Ended(err error) bool {
	return slices.ContainsFunc([]error{
		io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE,
	}, func(known error) bool { return errors.Is(err, known) })
}

// IsTimeout reports whether the apiserver was too slow to answer or to connect to.
func IsTimeout(err error) bool {
	t, ok := errors.AsType[net.Error](err)
	return ok && t.Timeout()
}
