package listen

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// patience is how long a condition is awaited.
const patience = 30 * time.Second

// bench is a limited listener on all loopback addresses, and what it accepted.
type bench struct {
	t        *testing.T
	port     int
	accepted chan net.Conn
	refusals chan Refusal
}

func newBench(t *testing.T, total, perPeer int) *bench {
	t.Helper()
	return newBenchOf(t, Bounds{Total: total, PerPeer: perPeer})
}

func newBenchOf(t *testing.T, bounds Bounds) *bench {
	t.Helper()
	inner, err := net.Listen("tcp4", "0.0.0.0:0")
	require.NoError(t, err)
	b := &bench{t: t, port: inner.Addr().(*net.TCPAddr).Port, accepted: make(chan net.Conn, 100), refusals: make(chan Refusal, 100)}
	bounds.Refused = func(r Refusal) { b.refusals <- r }
	l := Limit(inner, bounds)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			b.accepted <- c
		}
	}()
	return b
}

// dial connects from an address of 127.0.0.0/8.
func (b *bench) dial(from string) net.Conn {
	b.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp4", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(b.port)).String())
	require.NoError(b.t, err)
	b.t.Cleanup(func() { _ = c.Close() })
	return c
}

func (b *bench) accept() net.Conn {
	b.t.Helper()
	select {
	case c := <-b.accepted:
		return c
	case <-time.After(patience):
		require.Fail(b.t, "no connection was accepted")
		return nil
	}
}

func (b *bench) refusal() Refusal {
	b.t.Helper()
	select {
	case r := <-b.refusals:
		return r
	case <-time.After(patience):
		require.Fail(b.t, "no connection was refused")
		return Refusal{}
	}
}

// assertClosed asserts that the server closed a connection.
func assertClosed(t *testing.T, c net.Conn) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	_, err := c.Read(make([]byte, 1))
	assert.Error(t, err)
	assert.NotErrorIs(t, err, os.ErrDeadlineExceeded)
}

// assertOpen asserts that what the server writes arrives.
func assertOpen(t *testing.T, server, client net.Conn) {
	t.Helper()
	_, err := server.Write([]byte("x"))
	require.NoError(t, err)
	require.NoError(t, client.SetReadDeadline(time.Now().Add(patience)))
	_, err = io.ReadFull(client, make([]byte, 1))
	assert.NoError(t, err)
}

func TestPeerAboveItsBoundIsRefused(t *testing.T) {
	b := newBench(t, 0, 2)
	b.dial("127.0.0.2")
	first := b.accept()
	b.dial("127.0.0.2")
	b.accept()
	assertClosed(t, b.dial("127.0.0.2"))
	assert.Equal(t, Refusal{netip.MustParseAddr("127.0.0.2"), PerPeer}, b.refusal())

	t.Run("others are accepted", func(t *testing.T) {
		client := b.dial("127.0.0.3")
		assertOpen(t, b.accept(), client)
	})
	t.Run("a closed connection makes room", func(t *testing.T) {
		require.NoError(t, first.Close())
		if err := first.Close(); err != nil { // counts once
			require.ErrorIs(t, err, net.ErrClosed)
		}
		client := b.dial("127.0.0.2")
		assertOpen(t, b.accept(), client)
		assertClosed(t, b.dial("127.0.0.2"))
	})
}

func TestNewConnectionReplacesOldest(t *testing.T) {
	tests := []struct {
		name   string
		bounds Bounds
		newest string // the address of the third connection
		bound  Bound
	}{
		{"of its peer", Bounds{PerPeer: 2}, "127.0.0.2", PerPeer},
		{"of the largest peer", Bounds{Total: 2}, "127.0.0.3", Total},
		{"of all", Bounds{Total: 2}, "127.0.0.2", Total},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			test.bounds.Replace = true
			b := newBenchOf(t, test.bounds)
			oldest := b.dial("127.0.0.2")
			b.accept()
			second := b.dial("127.0.0.2")
			secondServer := b.accept()
			newest := b.dial(test.newest)
			newestServer := b.accept()

			assert.Equal(t, Refusal{netip.MustParseAddr("127.0.0.2"), test.bound}, b.refusal())
			assertClosed(t, oldest)
			assertOpen(t, secondServer, second)
			assertOpen(t, newestServer, newest)
		})
	}
}

func TestFullListenerClosesOfTheLargestPeer(t *testing.T) {
	b := newBench(t, 4, 0)
	var flood []net.Conn
	for range 4 {
		flood = append(flood, b.dial("127.0.0.2"))
		b.accept()
	}
	neighbour := b.dial("127.0.0.3")
	server := b.accept()
	assert.Equal(t, Refusal{netip.MustParseAddr("127.0.0.2"), Total}, b.refusal())
	assertClosed(t, flood[3])

	assertClosed(t, b.dial("127.0.0.2"))
	assert.Equal(t, Refusal{netip.MustParseAddr("127.0.0.2"), Total}, b.refusal())
	assertOpen(t, server, neighbour)
}

func TestFullListenerKeepsEqualPeers(t *testing.T) {
	b := newBench(t, 2, 0)
	one, two := b.dial("127.0.0.2"), b.dial("127.0.0.3")
	servers := map[string]net.Conn{}
	for range 2 {
		c := b.accept()
		servers[PeerOf(c).String()] = c
	}
	assertClosed(t, b.dial("127.0.0.4"))
	assert.Equal(t, Refusal{netip.MustParseAddr("127.0.0.4"), Total}, b.refusal())
	assertOpen(t, servers["127.0.0.2"], one)
	assertOpen(t, servers["127.0.0.3"], two)
}

func TestFirstConnectionWaitsForRoom(t *testing.T) {
	for name, free := range map[string]func(net.Conn){
		"until another has authenticated": Trust,
		"until another has ended":         func(c net.Conn) { _ = c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBenchOf(t, Bounds{Total: 1, Wait: true})
			b.dial("127.0.0.2")
			first := b.accept()
			waiting := b.dial("127.0.0.3")
			require.Never(t, func() bool { return len(b.accepted)+len(b.refusals) > 0 }, 100*time.Millisecond, 10*time.Millisecond)
			free(first)
			assertOpen(t, b.accept(), waiting)
			require.Empty(t, b.refusals)
		})
	}
	t.Run("but not where a peer has more", func(t *testing.T) {
		b := newBenchOf(t, Bounds{Total: 2, Wait: true})
		b.dial("127.0.0.2")
		b.accept()
		second := b.dial("127.0.0.2")
		b.accept()
		other := b.dial("127.0.0.3")
		assertOpen(t, b.accept(), other)
		assertClosed(t, second)
	})
	t.Run("and a second one is refused", func(t *testing.T) {
		b := newBenchOf(t, Bounds{Total: 1, Wait: true})
		b.dial("127.0.0.2")
		b.accept()
		assertClosed(t, b.dial("127.0.0.2"))
	})
}

func TestCloseEndsAWaitingAccept(t *testing.T) {
	inner, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	l := Limit(inner, Bounds{Total: 1, Wait: true})
	for _, from := range []string{"127.0.0.2", "127.0.0.3"} {
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp4", inner.Addr().String())
		require.NoError(t, err)
		defer func() { _ = c.Close() }()
	}
	_, err = l.Accept()
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		ended <- err
	}()
	time.Sleep(10 * time.Millisecond) // or it does not wait yet, which must end as well
	require.NoError(t, l.Close())
	select {
	case err := <-ended:
		require.ErrorIs(t, err, net.ErrClosed)
	case <-time.After(patience):
		require.Fail(t, "it waits")
	}
}

func TestTrustedConnectionsLeaveTheTotal(t *testing.T) {
	b := newBench(t, 1, 2)
	trusted := b.dial("127.0.0.2")
	server := b.accept()
	Trust(server)
	other := b.dial("127.0.0.3")
	assertOpen(t, b.accept(), other)
	assertClosed(t, b.dial("127.0.0.2"))
	assert.Equal(t, Refusal{netip.MustParseAddr("127.0.0.2"), Total}, b.refusal())
	assertOpen(t, server, trusted)

	t.Run("and count for their peer", func(t *testing.T) {
		require.NoError(t, other.Close())
		another := newBench(t, 0, 1)
		another.dial("127.0.0.2")
		Trust(another.accept())
		assertClosed(t, another.dial("127.0.0.2"))
		assert.Equal(t, Refusal{netip.MustParseAddr("127.0.0.2"), PerPeer}, another.refusal())
	})
}

func TestPeersOfUnixSocketsShareTheTotal(t *testing.T) {
	inner, err := net.Listen("unix", t.TempDir()+"/socket")
	require.NoError(t, err)
	l := Limit(inner, Bounds{Total: 2, PerPeer: 1})
	for range 2 {
		c, err := net.Dial("unix", inner.Addr().String())
		require.NoError(t, err)
		defer func() { _ = c.Close() }()
		_, err = l.Accept()
		require.NoError(t, err)
	}
}

func TestAcceptReturnsTheListenersError(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := Limit(inner, Bounds{Total: 1})
	require.NoError(t, l.Close())
	_, err = l.Accept()
	assert.True(t, errors.Is(err, net.ErrClosed))
}
