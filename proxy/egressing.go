package proxy

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"

	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/egress"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
)

// outward are the pod's accounts of connections to other hosts, apart from those of
// connections to the apiserver: whatever it asks of others, it can renew its lock.
type outward struct{ open, http2, unserved, held bounds.Account }

func newEgress(p *Pod) *egress.Server {
	s := p.server
	p.outward.open = bounds.Account{Pool: s.connections, Own: ownConnections}
	p.outward.http2 = bounds.Account{Pool: s.http2, Own: ownHTTP2}
	p.outward.unserved = bounds.Account{Pool: s.unserved, Own: ownUnserved}
	p.outward.held = bounds.Account{Pool: s.long, Own: ownLong}
	var leaf func(context.Context, string) (*tls.Certificate, error)
	if s.egressLeaf != nil {
		leaf = s.egressLeaf()
	}
	return egress.NewServer(egress.Config{
		Namespace: p.info.Namespace, Pod: p.id, UID: p.info.UID,
		Dial: p.dial,
		Policy: func() (*egress.Policy, bool) {
			if pol := p.policy.Load(); pol != nil {
				return pol.egress, true
			}
			return nil, false
		},
		Forbidden: p.isAPIServer,
		Leaf:      leaf,
		Roots:     s.egressRoots,
		Bounds: egress.Bounds{
			Open:     &p.outward.open,
			HTTP2:    &p.outward.http2,
			Unserved: &p.outward.unserved,
			Held:     &p.outward.held,
			Reached:  p.bound,
		},
		Log: s.log,
		Count: func(protocol, verdict string) {
			p.workload().Egressed(s.metrics, protocol, verdict)
		},
		Limited: func(r *limit.Refusal) {
			if pol := p.policy.Load(); pol != nil {
				pol.limited.Count(r.Breaker, r.Rule, r.Reason)
			}
		},
		Harmed: func(by fault.Injected) {
			if pol := p.policy.Load(); pol != nil {
				pol.injected.Count(by.Injection, by.Rule, by.Kind.String())
			}
		},
		Panicked: s.metrics.Panics.Inc,
	})
}

// ServeEgress accepts the pod's redirected connections to other hosts on l, which it
// closes. They are egress.Conns. It returns nil after Drain or Shutdown began, and may
// be called for several listeners.
func (p *Pod) ServeEgress(l net.Listener) error { return p.egress.Serve(l) }

// isAPIServer reports whether an address is the apiserver's: whoever is redirected
// from there on the way to other hosts would be held to nothing.
func (p *Pod) isAPIServer(to netip.AddrPort) bool {
	c := p.clients.Load()
	return c == nil || c.cluster.Has(to)
}

// drainEgress is Drain of the connections to other hosts. It ends when they have.
func (p *Pod) drainEgress(ctx context.Context) <-chan error {
	p.egress.Stop()
	ended := make(chan error, 1)
	go func() { ended <- p.egress.Drain(ctx) }()
	return ended
}
