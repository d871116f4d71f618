package downstream

import (
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/tcptest"
)

// A client that stops reading is given up, unless its connection was upgraded.
func TestWriteBoundsStalledClients(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	go func() { _, _ = io.Copy(io.Discard, b) }()
	spy := &deadlines{Conn: a}
	conns := NewPools().Conns(func(string) {})
	c := conns.Accept(spy, false)
	write := func() {
		_, err := c.Write([]byte("x"))
		require.NoError(t, err)
	}
	write()
	require.Len(t, spy.set, 1)
	require.WithinDuration(t, time.Now().Add(Stall), spy.set[0], 5*time.Second)
	write()
	require.Len(t, spy.set, 1, "the deadline is still far")
	c.deadline.Add(-int64(Stall / 2))
	write()
	require.Len(t, spy.set, 2)
	require.NoError(t, c.SetWriteDeadline(time.Now().Add(time.Second)))
	write()
	require.Len(t, spy.set, 3, "the deadline that was set applies")
	c.Upgraded.Store(true)
	require.NoError(t, c.SetDeadline(time.Time{}))
	write()
	require.Len(t, spy.set, 4)
	require.NoError(t, c.Close())
	require.Zero(t, conns.Open.Taken())
}

// A client that has not read yet that its connection ends must be able to send a request, and see
// that it is not served.
func TestClosedConnectionsLingerInATakeover(t *testing.T) {
	for name, c := range map[string]struct {
		before  func(*Conns, *Conn)
		lingers bool
	}{
		"takeover": {func(s *Conns, _ *Conn) { s.Stop() }, true},
		"at work":  {func(*Conns, *Conn) {}, false},
		"reset":    {func(s *Conns, c *Conn) { s.Stop(); c.Reset() }, false},
		"upgraded": {func(s *Conns, c *Conn) { s.Stop(); c.Upgraded.Store(true) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, conns, served := accepted(t)
			c.before(conns, served)
			require.NoError(t, served.Close())
			require.Error(t, served.Life.Err())
			if !c.lingers {
				require.NoError(t, conns.Wait(t.Context()))
				return
			}
			require.Len(t, conns.List(), 1)
			for range 2 { // the second one would fail after a TCP reset
				_, err := client.Write([]byte("request"))
				require.NoError(t, err)
				_, err = client.Read(make([]byte, 1))
				require.ErrorIs(t, err, io.EOF)
			}
			require.NoError(t, client.Close())
			require.NoError(t, conns.Wait(t.Context()))
			require.Zero(t, conns.Open.Taken())
		})
	}
}

func TestLingeringEndsWithTheSecondClose(t *testing.T) {
	_, conns, served := accepted(t)
	conns.Stop()
	require.NoError(t, served.Close())
	require.NoError(t, served.Close())
	require.NoError(t, conns.Wait(t.Context()))
}

// accepted returns a TCP connection, both ends.
func accepted(t *testing.T) (client net.Conn, conns *Conns, served *Conn) {
	t.Helper()
	client, raw := tcptest.Pair(t)
	conns = NewPools().Conns(func(string) {})
	return client, conns, conns.Accept(raw, false)
}

// deadlines records the deadlines that are set.
type deadlines struct {
	net.Conn
	set []time.Time
}

func (d *deadlines) SetWriteDeadline(t time.Time) error {
	d.set = append(d.set, t)
	return d.Conn.SetWriteDeadline(t)
}

func (d *deadlines) SetDeadline(t time.Time) error {
	d.set = append(d.set, t)
	return d.Conn.SetDeadline(t)
}

func TestStopClosesListenersThatComeLater(t *testing.T) {
	conns := NewPools().Conns(func(string) {})
	conns.Stop()
	require.Error(t, conns.Draining.Err())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	conns.Listen(l)
	_, err = l.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestWaitEndsWithTheLastConnection(t *testing.T) {
	conns := NewPools().Conns(func(string) {})
	a, b := net.Pipe()
	c := conns.Accept(a, false)
	d := conns.Accept(b, true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	require.ErrorIs(t, conns.Wait(ctx), context.DeadlineExceeded)
	ended := make(chan error)
	go func() { ended <- conns.Wait(t.Context()) }()
	require.NoError(t, c.Close())
	require.NoError(t, c.Close(), "the accounts change once")
	require.NoError(t, d.Close())
	require.NoError(t, <-ended)
	require.Error(t, c.Life.Err())
	require.Zero(t, conns.Open.Taken())
}
