package egress

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// maxVia is the maximum number of nested CONNECTs on a connection.
const maxVia = 4

// connect forwards a CONNECT to a forward proxy. The tunnel is then served as any other
// connection. The rules must allow both the host of the CONNECT and the host that is
// seen within the tunnel.
func (x *request) connect() {
	c := x.c
	to := c.server.up
	up, resp, err := c.ask(x.r.Context(), to, x.r)
	if err != nil {
		failed(x.w, x.r, err)
		return
	}
	if !x.hold(0, resp.Header) {
		_ = up.Close()
		failed(x.w, x.r, downstream.ErrTooMuch)
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
	x.enclose(up, to, early)
	if _, err := fmt.Fprintf(c.Conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		_ = c.Close()
		return
	}
	x.s.flows.Remove(&x.flow)
	c.Serving(-1) // what is read from here on is accounted for again
	defer c.Serving(1)
	c.Next = x.s.look(c)
}

// enclose makes the client's connection the tunnel of the CONNECT. up is its first connection
// to the server; for further ones the CONNECT is repeated. early contains what was already
// read from the client.
func (x *request) enclose(up net.Conn, to dialer, early *bufio.ReadWriter) {
	c := x.c
	first := c.first(up)
	asked := x.r.Clone(c.Life)
	c.server.up = func(ctx context.Context) (net.Conn, error) {
		if up := first(); up != nil {
			return up, nil
		}
		return c.again(ctx, to, asked)
	}
	c.around.ticket, c.around.faults = x.ticket, x.injecting
	c.target.port = x.asked[0].Port
	c.target.via = append(c.target.via, x.asked[0].Host)
	held, _ := early.Peek(early.Reader.Buffered())
	c.early = append([]byte(nil), held...)
	heads := x.held - requestWeight // they stay in memory, to repeat the CONNECT
	context.AfterFunc(c.Life, func() { c.s.Held.Give(heads) })
	x.held = requestWeight
	x.release()
}

// declined forwards the answer of a forward proxy that does not connect. It ends when
// the client disconnects, or at the deadline that ask set.
func (x *request) declined(up net.Conn, resp *http.Response) {
	shut := func() { _ = up.Close() }
	defer shut()
	defer context.AfterFunc(x.r.Context(), shut)()
	defer context.AfterFunc(x.c.Life, shut)()
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
	if err != nil { // else the client would take a truncated body for a complete one
		panic(http.ErrAbortHandler)
	}
}

// flushing is a writer that flushes after each write.
type flushing struct {
	io.Writer
	control *http.ResponseController
}

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.Writer.Write(p)
	return n, errors.Join(err, f.control.Flush())
}

// ask sends a CONNECT and reads the head of the answer. Unless the answer is 2xx, the
// deadline of the connection stays set.
func (c *conn) ask(ctx context.Context, to dialer, r *http.Request) (net.Conn, *http.Response, error) {
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
		out.Header["User-Agent"] = []string{""} // else net/http adds its own
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
	for err == nil && resp.StatusCode/100 == 1 && resp.StatusCode != http.StatusSwitchingProtocols { // the final answer follows
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
		head.N = 1 << 20 // bound of the body of a refusal
		return up, resp, nil
	}
	_ = up.SetDeadline(time.Time{})
	if n := b.Buffered(); n > 0 {
		held, _ := b.Peek(n)
		up = &reading{up, io.MultiReader(bytes.NewReader(held), up).Read}
	}
	return up, resp, nil
}

// final returns an error if the status of resp is not that of a final answer.
func final(resp *http.Response) error {
	if resp.StatusCode < 200 || resp.StatusCode > 999 {
		return fmt.Errorf("invalid status %d", resp.StatusCode)
	}
	return nil
}

// again repeats a CONNECT for a further connection to the same host.
func (c *conn) again(ctx context.Context, to dialer, r *http.Request) (net.Conn, error) {
	up, resp, err := c.ask(ctx, to, r)
	if err == nil && resp.StatusCode/100 != 2 {
		_ = up.Close()
		return nil, fmt.Errorf("the proxy answered %d", resp.StatusCode)
	}
	return up, err
}

// reading is a connection that is read by another function.
type reading struct {
	net.Conn
	read func([]byte) (int, error)
}

func (r *reading) Read(b []byte) (int, error) { return r.read(b) }

func (r *reading) CloseWrite() error { return closeWrite(r.Conn) }

func closeWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
