package egress

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"time"
)

// connect passes on what a proxy is asked to connect to. What then goes through the
// proxy is looked at as any other connection, and both the host that the proxy was
// asked for and the one that shows within must be let through.
func (x *exchange) connect() {
	p, _ := x.s.Policy()
	host := x.asked[0].Host
	within := p.decrypts(host) // then what goes through decides
	x.s.flows.add(&x.flow)
	if !within && !x.admit() {
		return
	}
	up, resp, err := x.c.ask(x.r.Context(), x.r)
	if err != nil {
		failed(x.w, x.r, err)
		return
	}
	x.code, x.verdict = resp.StatusCode, VerdictPassed
	if resp.StatusCode/100 != 2 {
		defer func() { _ = up.Close() }()
		x.plain()
		header := x.w.Header()
		maps.Copy(header, resp.Header)
		for _, k := range []string{"Connection", "Keep-Alive", "Transfer-Encoding"} {
			delete(header, k)
		}
		x.w.WriteHeader(resp.StatusCode)
		_, _ = io.Copy(x.w, resp.Body)
		return
	}
	_, early, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		_ = up.Close()
		failed(x.w, x.r, fmt.Errorf("hijack: %w", err))
		return
	}
	c := x.c
	first := once(&up)
	asked := x.r.Clone(c.life)
	c.up = func(ctx context.Context) (net.Conn, error) {
		if up := first(); up != nil {
			return *up, nil
		}
		return c.again(ctx, asked)
	}
	context.AfterFunc(c.life, func() { // before it is anybody's
		if up := first(); up != nil {
			_ = (*up).Close()
		}
	})
	if !within {
		c.taken = host
	}
	c.port = x.asked[0].Port
	c.via = []string{host}
	held, _ := early.Peek(early.Reader.Buffered())
	c.early = append([]byte(nil), held...)
	x.release()
	if _, err := fmt.Fprintf(c.Conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		_ = c.Close()
		return
	}
	x.s.flows.remove(&x.flow)
	x.s.look(c)
}

// ask sends a CONNECT to where c was meant to go.
func (c *conn) ask(ctx context.Context, r *http.Request) (net.Conn, *http.Response, error) {
	up, err := c.dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = up.Close() })
	_ = up.SetDeadline(time.Now().Add(dialTimeout))
	out := &http.Request{Method: http.MethodConnect, URL: r.URL, Host: r.Host, Header: r.Header.Clone()}
	for _, k := range []string{"Connection", "Keep-Alive", "Transfer-Encoding", "Content-Length", "Te", "Trailer", "Upgrade"} {
		out.Header.Del(k)
	}
	if out.Header["User-Agent"] == nil {
		out.Header["User-Agent"] = []string{""} // else Go names itself
	}
	if err := out.Write(up); err != nil {
		stop()
		_ = up.Close()
		return nil, nil, err
	}
	head := &io.LimitedReader{R: up, N: 2 * maxHeaderBytes}
	b := bufio.NewReader(head)
	resp, err := http.ReadResponse(b, out)
	if err != nil || !stop() {
		_ = up.Close()
		return nil, nil, errors.Join(err, ctx.Err())
	}
	_ = up.SetDeadline(time.Time{})
	if resp.StatusCode/100 != 2 {
		head.N = 1 << 20 // of a body that says why
		return up, resp, nil
	}
	if n := b.Buffered(); n > 0 {
		held, _ := b.Peek(n)
		up = &begun{up, held}
	}
	return up, resp, nil
}

// again is ask for a further connection to the same.
func (c *conn) again(ctx context.Context, r *http.Request) (net.Conn, error) {
	up, resp, err := c.ask(ctx, r)
	if err == nil && resp.StatusCode/100 != 2 {
		_ = up.Close()
		return nil, fmt.Errorf("the proxy answered %d", resp.StatusCode)
	}
	return up, err
}

// begun is a connection of which something was read.
type begun struct {
	net.Conn
	early []byte
}

func (b *begun) Read(p []byte) (int, error) {
	if len(b.early) > 0 {
		n := copy(p, b.early)
		b.early = b.early[n:]
		return n, nil
	}
	return b.Conn.Read(p)
}

func (b *begun) CloseWrite() error {
	if half, ok := b.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
