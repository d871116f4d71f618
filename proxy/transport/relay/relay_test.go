package relay

import (
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// duplex is a connection whose directions end independently.
type duplex struct {
	net.Conn          // reads
	to       net.Conn // writes
}

func (d duplex) Write(b []byte) (int, error) { return d.to.Write(b) }
func (d duplex) CloseWrite() error           { return d.to.Close() }

func (d duplex) Close() error {
	_ = d.to.Close()
	return d.Conn.Close()
}

func pair() (near, far duplex) {
	a, b := net.Pipe()
	c, d := net.Pipe()
	return duplex{a, c}, duplex{d, b}
}

func TestHalfClosedRelayEndsSooner(t *testing.T) {
	const idle = 5 * time.Hour
	for name, want := range map[string]struct {
		end    bool
		within time.Duration
	}{
		"both are quiet": {false, 3 * idle},
		"one has ended":  {true, 3 * halfClosed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, down := pair()
				up, server := pair()
				start := time.Now()
				if want.end {
					time.AfterFunc(time.Minute, func() { _ = client.CloseWrite() })
				}
				Both(down, up, idle)
				require.Greater(t, time.Since(start), want.within/3)
				require.LessOrEqual(t, time.Since(start), want.within+time.Minute)
				_ = server.Close()
			})
		})
	}
}

func TestTrafficInOneDirectionKeepsBoth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const idle, words = 5 * time.Hour, 200
		client, down := pair()
		up, server := pair()
		received := make(chan int64, 1)
		go func() {
			_, n := Both(down, up, idle)
			received <- n
		}()
		go func() { _, _ = io.Copy(io.Discard, client) }()
		for range words {
			_, err := io.WriteString(server, "x")
			require.NoError(t, err)
			time.Sleep(idle / 20)
		}
		require.Empty(t, received, "cut")
		began := time.Now()
		require.EqualValues(t, words, <-received) // silence ends it
		require.LessOrEqual(t, time.Since(began), 3*idle)
	})
}
