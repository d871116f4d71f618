package proxy

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/relay"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// tunnelIdle is how long a tunnel may say nothing in either direction. Peers that
// are gone are found by TCP keep-alives; nothing in Kubernetes itself lets a
// stream be idle for longer than four hours.
const tunnelIdle = 5 * time.Hour

// tunnels are the connections that are passed through opaque now.
type tunnels struct {
	mu   sync.Mutex
	open map[net.Conn]struct{}
	last time.Time // when one ended
}

func (t *tunnels) add(c net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil {
		t.open = map[net.Conn]struct{}{}
	}
	t.open[c] = struct{}{}
}

func (t *tunnels) remove(c net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.open, c)
	t.last = time.Now()
}

// remain is how long writes in tunnels may still take effect that go on for the given
// time after the tunnel.
func (t *tunnels) remain(unseen time.Duration) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.open) > 0 {
		return unseen
	}
	return max(0, unseen-time.Since(t.last))
}

func (t *tunnels) cut() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.open {
		_ = c.Close()
	}
}

// tunnel passes a connection through to the apiserver as it is, under a policy
// that says so.
func (p *Pod) tunnel(down net.Conn, pol *policy) {
	defer p.left()
	defer func() { _ = down.Close() }()
	p.tunnels.add(down)
	defer p.tunnels.remove(down)
	// Whoever takes passthrough away cuts what is in tunnels after that.
	if now := p.policy.Load(); !now.passthrough || p.done.Err() != nil {
		return
	}
	clients := p.clients.Load()
	if clients == nil {
		return
	}
	start := time.Now()
	up, err := clients.main.Tunnel(p.done)
	if err != nil {
		pol.metrics.Counter(p.server.metrics.UpstreamErrors).Inc()
		p.server.log.Debug("upstream", "pod", p.id, "error", err)
		return
	}
	defer func() { _ = up.Close() }()
	if p.info.Journal != nil {
		p.info.Journal.Begin()
		defer func() { writes.Record(p.info.Journal, p.unseen()) }()
	}
	m := p.server.metrics
	pol.metrics.Counter(m.Tunnels).Inc()
	sent, received := relay.Both(down, up, tunnelIdle)
	pol.metrics.Counter(m.TunnelBytes, "up").Add(float64(sent))
	pol.metrics.Counter(m.TunnelBytes, "down").Add(float64(received))
	p.server.log.LogAttrs(context.Background(), slog.LevelDebug, "passthrough",
		slog.String("pod", p.id),
		slog.String("uid", p.info.UID),
		slog.Int64("bytes_up", sent),
		slog.Int64("bytes_down", received),
		slog.Duration("duration", time.Since(start)),
	)
}
