package rawio

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/tcptest"
)

// pair returns a connection, and its other end as net makes it.
func pair(t testing.TB) (c net.Conn, peer *net.TCPConn) {
	t.Helper()
	return pairOf(t, New)
}

func pairOf(t testing.TB, wrap func(net.Conn) net.Conn) (c net.Conn, peer *net.TCPConn) {
	t.Helper()
	raw, peer := tcptest.Pair(t)
	return wrap(raw), peer
}

func TestOtherConnectionsStayAsTheyAre(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	require.Equal(t, a, New(a))
}

func TestBytesArriveAsTheyWereSent(t *testing.T) {
	for name, wrap := range map[string]func(net.Conn) net.Conn{"as asked": New, "ahead": Ahead} {
		t.Run(name, func(t *testing.T) { arrive(t, wrap) })
	}
}

func arrive(t *testing.T, wrap func(net.Conn) net.Conn) {
	t.Helper()
	c, peer := pairOf(t, wrap)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // more than the buffers of the kernel
	go func() {
		_, _ = io.Copy(peer, peer)
		_ = peer.CloseWrite()
	}()
	var all sync.WaitGroup
	all.Go(func() {
		n, err := c.Write(sent)
		require.NoError(t, err)
		require.Equal(t, len(sent), n)
	})
	got := make([]byte, len(sent))
	_, err := io.ReadFull(c, got)
	require.NoError(t, err)
	require.True(t, bytes.Equal(sent, got))
	all.Wait()
	require.NoError(t, c.(interface{ CloseWrite() error }).CloseWrite())
	n, err := c.Read(got)
	require.Zero(t, n)
	require.Equal(t, io.EOF, err)
}

// What one read leaves of what has arrived, the next gets without a system call, also after the end.
func TestReadsAhead(t *testing.T) {
	c, peer := pairOf(t, Ahead)
	_, err := peer.Write([]byte("hello"))
	require.NoError(t, err)
	b := make([]byte, 2)
	n, err := c.Read(b)
	require.NoError(t, err)
	require.Equal(t, "he", string(b[:n]))
	require.Equal(t, 3, c.(interface{ Buffered() int }).Buffered())
	require.NoError(t, peer.Close())
	require.NoError(t, c.(interface{ CloseRead() error }).CloseRead())
	rest := make([]byte, 10)
	n, err = c.Read(rest)
	require.NoError(t, err)
	require.Equal(t, "llo", string(rest[:n]))
	require.Zero(t, c.(interface{ Buffered() int }).Buffered())
	_, err = c.Read(rest)
	require.Equal(t, io.EOF, err)
}

func TestReadOfNothingReturnsAtOnce(t *testing.T) {
	c, _ := pair(t)
	n, err := c.Read(nil)
	require.NoError(t, err)
	require.Zero(t, n)
	n, err = c.Write(nil)
	require.NoError(t, err)
	require.Zero(t, n)
}

// Callers, net/http among them, distinguish errors by their types.
func TestErrorsAreThoseOfNet(t *testing.T) {
	full := make([]byte, 64<<20)
	for name, test := range map[string]struct {
		op   string
		do   func(c net.Conn, peer *net.TCPConn) error
		want error
	}{
		"read at a deadline": {"read", func(c net.Conn, _ *net.TCPConn) error {
			_ = c.SetReadDeadline(time.Now().Add(-time.Second))
			_, err := c.Read(make([]byte, 1))
			return err
		}, os.ErrDeadlineExceeded},
		"read that waits for a deadline": {"read", func(c net.Conn, _ *net.TCPConn) error {
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			_, err := c.Read(make([]byte, 1))
			return err
		}, os.ErrDeadlineExceeded},
		"write that waits for a deadline": {"write", func(c net.Conn, _ *net.TCPConn) error {
			_ = c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
			n, err := c.Write(full)
			if n == 0 || n == len(full) {
				return errors.New("it wrote all or nothing")
			}
			return err
		}, os.ErrDeadlineExceeded},
		"read while it is closed": {"read", func(c net.Conn, peer *net.TCPConn) error {
			_, _ = peer.Write([]byte("x"))
			_, _ = c.Read(make([]byte, 1))
			time.AfterFunc(20*time.Millisecond, func() { _ = c.Close() })
			_, err := c.Read(make([]byte, 1))
			return err
		}, net.ErrClosed},
		"write to a closed one": {"write", func(c net.Conn, _ *net.TCPConn) error {
			_ = c.Close()
			_, err := c.Write([]byte("x"))
			return err
		}, net.ErrClosed},
		"read after a reset": {"read", func(c net.Conn, peer *net.TCPConn) error {
			_ = peer.SetLinger(0)
			_ = peer.Close()
			_, err := c.Read(make([]byte, 1))
			return err
		}, syscall.ECONNRESET},
		"write after a reset": {"write", func(c net.Conn, peer *net.TCPConn) error {
			_ = peer.SetLinger(0)
			_ = peer.Close()
			_, _ = c.Read(make([]byte, 1))
			_, err := c.Write([]byte("x"))
			return err
		}, syscall.EPIPE},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, peer := pair(t)
			err := test.do(c, peer)
			require.ErrorIs(t, err, test.want)
			op, ok := errors.AsType[*net.OpError](err)
			require.True(t, ok)
			require.Equal(t, test.op, op.Op)
			require.Equal(t, errors.Is(test.want, os.ErrDeadlineExceeded), op.Timeout())
		})
	}
}

func TestReadsAndWritesAllocateNothing(t *testing.T) {
	c, peer := pairOf(t, Ahead)
	b := make([]byte, 1)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		_, _ = c.Write(b)
		_, _ = peer.Read(b)
		_, _ = peer.Write(b)
		_, _ = c.Read(b)
	}))
}
