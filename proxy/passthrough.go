package proxy

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/relay"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// tunnels counts the connections that are passed through unread.
type tunnels struct {
	mu   sync.Mutex
	open int
	last time.Time // when one ended
}

func (t *tunnels) add(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open += n
	t.last = time.Now()
}

// remain returns how long writes in tunnels may still take effect, if they may do so for
// the given time after the end of the tunnel.
func (t *tunnels) remain(unseen time.Duration) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open > 0 {
		return unseen
	}
	return max(0, unseen-time.Since(t.last))
}

func (p *Pod) cutTunnels() {
	for _, c := range p.conns.List() {
		if c.Tunnel {
			_ = c.Close()
		}
	}
}

// tunnel relays a connection to the apiserver unread, under a policy of passthrough.
func (p *Pod) tunnel(down *downstream.Conn, pol *policy) {
	defer func() { _ = down.Close() }()
	p.tunnels.add(1)
	defer p.tunnels.add(-1)
	// A change of the policy cuts the tunnels that are counted by then.
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
	sent, received := relay.Both(down.Bare(), up, downstream.TunnelIdle)
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
