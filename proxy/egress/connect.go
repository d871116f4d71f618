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

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
)

// maxVia is how many proxies a connection may go through, one within the other.
const maxVia = 4

// connect passes on what a proxy is asked to connect to. What then goes through the
// proxy is looked at as any other connection, and both the host that the proxy was
// asked for and the one that shows within must be let through.
func (x *exchange) connect() {
	c := x.c
	if len(c.via) == maxVia {
		x.malformed(http.StatusBadRequest, "this goes through too many proxies")
		return
	}
	p, _ := x.s.Policy()
	x.flow.asked, x.flow.within = x.asked, p.decrypts(x.asked...)
	x.s.flows.add(&x.flow)
	c.met = fault.Met{}
	if !x.admit(c.met) {
		return
	}
	to := c.up
	up, resp, err := c.ask(x.r.Context(), to, x.r)
	if err != nil {
		failed(x.w, x.r, err)
		return
	}
	if !x.holds(resp.Header) {
		_ = up.Close()
		failed(x.w, x.r, errTooMuch)
		return
	}
	x.code, x.verdict = resp.StatusCode, VerdictPassed
	if resp.StatusCode/100 != 2 {
		x.declined(up, resp)
		return
	}
	_, early, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		_ = up.Close()
		failed(x.w, x.r, fmt.Errorf("hijack: %w", err))
		return
	}
	first := once(&up)
	asked := x.r.Clone(c.life)
	c.up = func(ctx context.Context) (net.Conn, error) {
		if up := first(); up != nil {
			return *up, nil
		}
		return c.again(ctx, to, asked)
	}
	context.AfterFunc(c.life, func() { // before it is anybody's
		if up := first(); up != nil {
			_ = (*up).Close()
		}
	})
	c.ticket, c.harm = x.ticket, x.harm
	c.port = x.asked[0].Port
	c.via = append(c.via, x.asked[0].Host)
	held, _ := early.Peek(early.Reader.Buffered())
	c.early = append([]byte(nil), held...)
	heads := x.held - requestWeight // they stay, to ask again with
	context.AfterFunc(c.life, func() { c.s.Bounds.Held.Give(heads) })
	x.held = requestWeight
	x.release()
	if _, err := fmt.Fprintf(c.Conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		_ = c.Close()
		return
	}
	x.s.flows.remove(&x.flow)
	c.serving.Add(-1) // what comes now is in the accounts again
	defer c.serving.Add(1)
	x.then = x.s.look(c)
}

// declined passes on what a proxy answers that does not connect. It ends with the
// client, and at ask's deadline.
func (x *exchange) declined(up net.Conn, resp *http.Response) {
	shut := func() { _ = up.Close() }
	defer shut()
	defer context.AfterFunc(x.r.Context(), shut)()
	defer context.AfterFunc(x.c.life, shut)()
	x.plain()
	header := x.w.Header()
	maps.Copy(header, resp.Header)
	for _, k := range []string{"Connection", "Keep-Alive", "Transfer-Encoding"} {
		delete(header, k)
	}
	x.w.WriteHeader(resp.StatusCode)
	w := flushing{x.w, http.NewResponseController(x.w)}
	_, err := w.Write(nil)
	if err == nil {
		_, err = io.Copy(w, resp.Body)
	}
	if err != nil { // or half of the body would look like all of it
		panic(http.ErrAbortHandler)
	}
}

// flushing sends at once what is written.
type flushing struct {
	io.Writer
	control *http.ResponseController
}

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.Writer.Write(p)
	return n, errors.Join(err, f.control.Flush())
}

// ask sends a CONNECT to. The deadline stays where the answer is no connection.
func (c *conn) ask(ctx context.Context, to way, r *http.Request) (net.Conn, *http.Response, error) {
	up, err := to(ctx)
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
	c.await()
	defer c.awaited()
	head := &io.LimitedReader{R: answering{up, c}, N: maxAnswerHead}
	b := bufio.NewReader(head)
	resp, err := http.ReadResponse(b, out)
	for err == nil && resp.StatusCode/100 == 1 && resp.StatusCode != http.StatusSwitchingProtocols { // the answer comes yet
		resp, err = http.ReadResponse(b, out)
	}
	if err == nil {
		err = final(resp)
	}
	if !stop() {
		err = errors.Join(err, ctx.Err())
	}
	if err != nil {
		_ = up.Close()
		return nil, nil, err
	}
	if resp.StatusCode/100 != 2 {
		head.N = 1 << 20 // of a body that says why
		return up, resp, nil
	}
	_ = up.SetDeadline(time.Time{})
	if n := b.Buffered(); n > 0 {
		held, _ := b.Peek(n)
		up = &begun{up, held}
	}
	return up, resp, nil
}

// final tells what is wrong with the status of an answer that is to be the last.
func final(resp *http.Response) error {
	if resp.StatusCode < 200 || resp.StatusCode > 999 {
		return fmt.Errorf("its status %d is none", resp.StatusCode)
	}
	return nil
}

// again is ask for a further connection to the same.
func (c *conn) again(ctx context.Context, to way, r *http.Request) (net.Conn, error) {
	up, resp, err := c.ask(ctx, to, r)
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
