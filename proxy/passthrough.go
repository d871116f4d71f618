package proxy

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/egress"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
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
	up, err := clients.main.Tunnel(p.lifetime.done)
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

// newEgress returns the server of the pod's connections to other hosts. They have accounts
// of their own, so that they cannot keep the pod from renewing its lock.
func newEgress(p *Pod) *egress.Server {
	s := p.server
	var leaf func(context.Context, string) (*tls.Certificate, error)
	if s.config.EgressLeaf != nil {
		leaf = s.config.EgressLeaf()
	}
	return egress.NewServer(egress.Config{
		Namespace: p.env.Info.Namespace, Pod: p.env.ID, UID: p.env.Info.UID,
		Dial: p.dial,
		Policy: func() (*egress.Policy, bool) {
			if pol := p.env.Policy.Load(); pol != nil {
				return pol.Traffic.Egress, true
			}
			return nil, false
		},
		Forbidden: p.isAPIServer,
		Leaf:      leaf,
		Roots:     s.config.EgressRoots,
		Conns:     s.conns.Conns(p.bound),
		Held:      &bounds.Account{Pool: s.long, Own: pipeline.OwnLong},
		Log:       s.log,
		Count: func(protocol, verdict string) {
			p.workload().Egressed(s.metrics, protocol, verdict)
		},
		Limited: func(r *limit.Refusal) {
			if pol := p.env.Policy.Load(); pol != nil {
				pol.Tally.Limited.Count(r.Breaker, r.Rule, r.Reason)
			}
		},
		Injected: func(by fault.Injected) {
			if pol := p.env.Policy.Load(); pol != nil {
				pol.CountFault(by)
			}
		},
		Panicked: s.metrics.Panics.Inc,
	})
}

// ServeEgress accepts the pod's redirected connections to other hosts on l, which it
// closes. They are egress.Conns. It returns nil after Drain or Shutdown began, and may
// be called for several listeners.
func (p *Pod) ServeEgress(l net.Listener) error { return p.egress.Serve(l) }

// isAPIServer reports whether an address is the apiserver's, or may be: the rules of the
// pod's shard do not apply to connections to other hosts.
func (p *Pod) isAPIServer(to netip.AddrPort) bool {
	c := p.inForce.clients.Load()
	return c == nil || c.cluster.Has(to)
}
