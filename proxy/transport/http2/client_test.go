package http2

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	xhttp2 "golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/tcptest"
)

// soon is longer than anything that a test waits for.
const soon = 20 * time.Second

// client is a client that sends and reads frames, and keeps to no rule.
type client struct {
	t *testing.T
	*xhttp2.Framer
	conn net.Conn
	head bytes.Buffer
	enc  *hpack.Encoder
	done chan struct{}
	err  error // of the server, when done is closed
}

// dial returns a client that has sent its preface.
func dial(t *testing.T, c Config, settings ...xhttp2.Setting) *client {
	t.Helper()
	ours, theirs := tcptest.Pair(t)
	out := &client{t: t, Framer: xhttp2.NewFramer(ours, ours), conn: ours, done: make(chan struct{})}
	go func() {
		defer close(out.done)
		out.err = newConn(context.Background(), NewServer(c), theirs, nil).serve(false)
	}()
	t.Cleanup(func() {
		_ = ours.Close()
		<-out.done
	})
	out.enc = hpack.NewEncoder(&out.head)
	out.ReadMetaHeaders = hpack.NewDecoder(table, nil)
	_, err := io.WriteString(ours, xhttp2.ClientPreface)
	require.NoError(t, err)
	require.NoError(t, out.WriteSettings(settings...))
	require.NoError(t, ours.SetReadDeadline(time.Now().Add(soon)))
	return out
}

// request returns the fields of a GET.
func request(extra ...string) []string {
	return append([]string{":method", "GET", ":scheme", "https", ":authority", "example.com", ":path", "/"}, extra...)
}

// block encodes names and values.
func (c *client) block(fields ...string) []byte {
	c.head.Reset()
	for i := 0; i < len(fields); i += 2 {
		require.NoError(c.t, c.enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}))
	}
	return c.head.Bytes()
}

// ask begins a stream.
func (c *client) ask(id uint32, end bool, fields ...string) {
	c.t.Helper()
	require.NoError(c.t, c.try(id, end, fields...))
}

// try is ask for a connection that the server may end.
func (c *client) try(id uint32, end bool, fields ...string) error {
	return c.WriteHeaders(xhttp2.HeadersFrameParam{
		StreamID: id, BlockFragment: c.block(fields...), EndStream: end, EndHeaders: true,
	})
}

// next returns the next frame of one of the types.
func (c *client) next(types ...xhttp2.FrameType) xhttp2.Frame {
	c.t.Helper()
	for {
		f, err := c.ReadFrame()
		require.NoError(c.t, err)
		for _, t := range types {
			if f.Header().Type == t {
				return f
			}
		}
	}
}

// answer returns the status and body of the response to a stream, or the code by which it was reset.
func (c *client) answer(id uint32) (status, body string, reset xhttp2.ErrCode) {
	c.t.Helper()
	for {
		f := c.next(xhttp2.FrameHeaders, xhttp2.FrameData, xhttp2.FrameRSTStream)
		if f.Header().StreamID != id {
			continue
		}
		switch f := f.(type) {
		case *xhttp2.MetaHeadersFrame:
			status = f.PseudoValue("status")
		case *xhttp2.DataFrame:
			body += string(f.Data())
		case *xhttp2.RSTStreamFrame:
			return status, body, f.ErrCode
		}
		if f.Header().Flags.Has(xhttp2.FlagDataEndStream) {
			return status, body, 0
		}
	}
}

// away returns the code of GOAWAY, after which the connection must end.
func (c *client) away() (code xhttp2.ErrCode, last uint32) {
	c.t.Helper()
	f := c.next(xhttp2.FrameGoAway).(*xhttp2.GoAwayFrame)
	code, last = f.ErrCode, f.LastStreamID
	for {
		if _, err := c.ReadFrame(); err != nil {
			var late net.Error
			require.False(c.t, errors.As(err, &late) && late.Timeout(), "the connection stays")
			return code, last
		}
	}
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })
