package upstream

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
)

// Upgrade sends r with an upgrade to protocol on a connection of its own. With
// status 101 conn is that connection, to be closed by the caller; with any
// other conn is nil, and closing the answer's body closes the connection.
func (c *Client) Upgrade(ctx context.Context, r *Request, protocol string) (resp *http.Response, conn io.ReadWriteCloser, err error) {
	raw, err := c.connect(ctx, protocolHTTP11)
	if err != nil {
		return nil, nil, err
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
	if r.Sent != nil {
		r.Sent()
	}
	head := appendHead(nil, r)
	head = head[:len(head)-2] // the blank line moves behind
	head = append(head, "Connection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"...)
	if _, err := raw.Write(head); err != nil {
		return nil, nil, err
	}
	br := bufio.NewReader(raw)
	resp, err = http.ReadResponse(br, &http.Request{Method: r.Method})
	if err != nil {
		return nil, nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		if resp.StatusCode < 200 {
			return nil, nil, fmt.Errorf("unexpected status %d", resp.StatusCode)
		}
		resp.Body = &closing{Reader: resp.Body, conn: raw.NetConn()}
		return resp, nil, nil
	}
	if got := resp.Header.Get("Upgrade"); !strings.EqualFold(got, protocol) {
		return nil, nil, fmt.Errorf("asked to upgrade to %q, got %q", protocol, got)
	}
	return resp, &buffered{Conn: raw, br: br}, nil
}

type closing struct {
	io.Reader
	conn net.Conn
}

func (c *closing) Close() error { return c.conn.Close() }

// buffered gives first what was read along with the head.
type buffered struct {
	net.Conn
	br *bufio.Reader
}

func (b *buffered) Read(p []byte) (int, error) { return b.br.Read(p) }
