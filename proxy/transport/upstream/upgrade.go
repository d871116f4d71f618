package upstream

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// Upgrade sends r with an upgrade to protocol on a connection of its own. With
// status 101 conn is that connection, to be closed by the caller; with any
// other conn is nil, and closing the answer's body closes the connection.
func (c *Client) Upgrade(ctx context.Context, r *Request, protocol string) (resp Response, conn *Upgraded, err error) {
	raw, err := c.connect(ctx, protocolHTTP11)
	if err != nil {
		return Response{}, nil, err
	}
	// Breaks the exchange of heads only: what comes after outlives ctx.
	stop := context.AfterFunc(ctx, func() { _ = raw.NetConn().Close() })
	defer func() {
		if !stop() && err == nil {
			err = ctx.Err()
		}
		if err != nil {
			_ = raw.NetConn().Close()
		}
	}()
	r.Sent = time.Now()
	head := appendHead(nil, r)
	head = head[:len(head)-2] // the blank line moves behind
	head = append(head, "Connection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"...)
	if _, err := raw.Write(head); err != nil {
		return Response{}, nil, err
	}
	br := bufio.NewReader(raw)
	resp, err = responseOf(http.ReadResponse(br, &http.Request{Method: r.Method}))
	if err != nil {
		return Response{}, nil, err
	}
	if resp.Status != http.StatusSwitchingProtocols {
		if resp.Status < 200 {
			return Response{}, nil, fmt.Errorf("unexpected status %d", resp.Status)
		}
		resp.Body = &closing{Reader: resp.Body, conn: raw.NetConn()}
		return resp, nil, nil
	}
	if got := resp.Get("Upgrade"); !strings.EqualFold(got, protocol) {
		return Response{}, nil, fmt.Errorf("asked to upgrade to %q, got %q", protocol, got)
	}
	return resp, &Upgraded{Conn: raw, br: br}, nil
}

type closing struct {
	io.Reader
	conn net.Conn
}

func (c *closing) Close() error { return c.conn.Close() }

// Upgraded is a connection that changed protocol.
type Upgraded struct {
	*tls.Conn
	br *bufio.Reader // has first what was read along with the head
}

func (u *Upgraded) Read(p []byte) (int, error) { return u.br.Read(p) }

// CloseWrite sends the end, and leaves the connection open for the apiserver's. It does so
// under TLS, where a writer that is blocked does not hinder it.
func (u *Upgraded) CloseWrite() error {
	if c, ok := u.NetConn().(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return u.NetConn().Close()
}

// Close closes the connection without a goodbye, which could block.
func (u *Upgraded) Close() error { return u.NetConn().Close() }
