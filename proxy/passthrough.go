package proxy

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
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

// tunnel relays a connection to the apiserver unread, under a policy of passthrough.
func (p *Pod) tunnel(down *downstream.Conn, pol *stages.Policy) {
	defer func() { _ = down.Close() }()
	p.accepting.tunnels.add(1)
	defer p.accepting.tunnels.add(-1)
	// A change of the policy cuts the tunnels that are counted by then.
	if now := p.env.Policy.Load(); !now.Passthrough || p.lifetime.done.Err() != nil {
		return
	}
	clients := p.inForce.clients.Load()
	if clients == nil {
		return
	}
	start := time.Now()
	up, err := clients.main.Dial(p.lifetime.done)
	if err != nil {
		pol.Tally.Metrics.Counter(p.server.metrics.UpstreamErrors).Inc()
		p.server.log.Debug("upstream", "pod", p.env.ID, "error", err)
		return
	}
	defer func() { _ = up.Close() }()
	if p.env.Info.Journal != nil {
		p.env.Info.Journal.Begin()
		defer func() { writes.Record(p.env.Info.Journal, p.unseen()) }()
	}
	m := p.server.metrics
	pol.Tally.Metrics.Counter(m.Tunnels).Inc()
	sent, received := relay.Both(down.Bare(), up, downstream.TunnelIdle)
	pol.Tally.Metrics.Counter(m.TunnelBytes, "up").Add(float64(sent))
	pol.Tally.Metrics.Counter(m.TunnelBytes, "down").Add(float64(received))
	p.server.log.LogAttrs(context.Background(), slog.LevelDebug, "passthrough",
		slog.String("pod", p.env.ID),
		slog.String("uid", p.env.Info.UID),
		slog.Int64("bytes_up", sent),
		slog.Int64("bytes_down", received),
		slog.Duration("duration", time.Since(start)),
	)
}
