package capture

import (
	"context"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkCapture captures and releases one pod.
func BenchmarkCapture(b *testing.B) {
	for _, m := range methods {
		b.Run(m.name, func(b *testing.B) {
			cfg := m.config(b)
			pod := newWorld(b).pod()
			m := agent(b, cfg)
			for b.Loop() {
				p, err := m.Capture(Request{UID: uid, NetNS: pod.path})
				require.NoError(b, err)
				require.NoError(b, p.Release())
			}
		})
	}
}

// BenchmarkDial compares the agent's dial from a pod's network namespace with a
// plain one, both within one namespace: what entering, marking and leaving cost.
func BenchmarkDial(b *testing.B) {
	for _, m := range methods {
		b.Run(m.name, func(b *testing.B) {
			cfg := m.config(b)
			p := captured(b, agent(b, cfg), uid, newWorld(b).pod(), "mesh")
			for b.Loop() {
				c, err := p.DialContext(context.Background(), "tcp", p.Listeners()[0].Addr().String())
				require.NoError(b, err)
				c.Close()
			}
		})
	}
	b.Run("plain", func(b *testing.B) {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		require.NoError(b, err)
		answer(b, "plain", l)
		for b.Loop() {
			c, err := net.Dial("tcp4", l.Addr().String())
			require.NoError(b, err)
			c.Close()
		}
	})
}
