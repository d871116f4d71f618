package upstream

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEndedRecognisesClosedConnections(t *testing.T) {
	for _, err := range []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE} {
		require.True(t, Ended(&net.OpError{Err: err}), err)
	}
	for _, err := range []error{net.ErrClosed, context.Canceled, syscall.ETIMEDOUT, syscall.EHOSTUNREACH, os.ErrDeadlineExceeded} {
		require.False(t, Ended(&net.OpError{Err: err}), err)
	}
}

// failing behaves like Linux after a peer has acknowledged nothing for too long: one call
// fails with the cause, and later ones return the end of the connection.
type failing struct {
	net.Conn
	failed atomic.Bool
}

func (c *failing) Write(p []byte) (int, error) {
	if c.failed.Load() {
		return 0, &net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.ETIMEDOUT)}
	}
	return c.Conn.Write(p)
}

func (c *failing) Read(p []byte) (int, error) {
	if c.failed.Load() {
		return 0, io.EOF
	}
	return c.Conn.Read(p)
}

func TestSilentPeerHasNotEnded(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	var raw *failing
	p := &pool{connect: func(ctx context.Context) (*tls.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", server.Listener.Addr().String())
		if err != nil {
			return nil, err
		}
		raw = &failing{Conn: c}
		conn := tls.Client(raw, &tls.Config{InsecureSkipVerify: true})
		return conn, conn.HandshakeContext(ctx)
	}}
	defer p.close()
	request := &Request{Method: "PUT", Target: "/", Host: "kubernetes"}
	resp, err := p.roundTrip(t.Context(), request)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)

	raw.failed.Store(true) // of the connection that is kept
	resp, err = p.roundTrip(t.Context(), request)
	if err == nil {
		_ = resp.Body.Close()
	}
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
	require.False(t, Ended(err))
}
