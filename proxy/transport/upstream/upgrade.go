package upstream

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// Upgrade sends r with an upgrade to a protocol, on a connection of its own. If the status is
// 101, conn is that connection, which the caller must close. Else conn is nil, and closing
// the body of the answer closes the connection.
func (c *Client) Upgrade(ctx context.Context, r *Request, protocol string) (resp Response, conn *Upgraded, err error) {
	raw, err := c.connect(ctx, protocolHTTP11)
	if err != nil {
		return Response{}, nil, err
	}
	// ctx ends only the exchange of heads.
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
	head = head[:len(head)-2] // without the blank line
	head = append(head, "Connection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"...)
	if _, err := raw.Write(head); err != nil {
		return Response{}, nil, err
	}
	br := bufio.NewReader(raw)
	m, err := readMessage(br, r.Method)
	if err != nil {
		return Response{}, nil, err
	}
	resp = m.response(wrapped{&m.content, raw.NetConn()})
	if resp.Status != http.StatusSwitchingProtocols {
		if resp.Status < 200 {
			return Response{}, nil, fmt.Errorf("unexpected status %d", resp.Status)
		}
		return resp, nil, nil
	}
	if got := resp.Get("Upgrade"); !strings.EqualFold(got, protocol) {
		return Response{}, nil, fmt.Errorf("asked to upgrade to %q, got %q", protocol, got)
	}
	return resp, &Upgraded{Conn: raw, br: br}, nil
}

// Upgraded is a connection that changed protocol.
type Upgraded struct {
	*tls.Conn
	br *bufio.Reader // may contain bytes that were read with the head
}

func (u *Upgraded) Read(p []byte) (int, error) { return u.br.Read(p) }

// CloseWrite sends a FIN, and leaves the other direction open. It does so below TLS, where a
// blocked writer does not delay it.
func (u *Upgraded) CloseWrite() error {
	if c, ok := u.NetConn().(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return u.NetConn().Close()
}

// Close closes the connection below TLS: a close_notify could block.
func (u *Upgraded) Close() error { return u.NetConn().Close() }
