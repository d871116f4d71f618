package proxy

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ctrlmesh/ctrlmesh/proxy/egress"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
)

// outward are the pod's accounts of connections to other hosts, apart from those of
// connections to the apiserver: whatever it asks of others, it can renew its lock.
type outward struct{ open, http2, unserved, held account }

// egressAccount is an account as package egress asks for one.
type egressAccount struct{ *account }

func (a egressAccount) Take(n int64) bool { return a.take(n) }
func (a egressAccount) Give(n int64)      { a.give(n) }

func newEgress(p *Pod) *egress.Server {
	s := p.server
	p.outward.open = account{pool: s.connections, own: ownConnections}
	p.outward.http2 = account{pool: s.http2, own: ownHTTP2}
	p.outward.unserved = account{pool: s.unserved, own: ownUnserved}
	p.outward.held = account{pool: s.long, own: ownLong}
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
			Open:     egressAccount{&p.outward.open},
			HTTP2:    egressAccount{&p.outward.http2},
			Unserved: egressAccount{&p.outward.unserved},
			Held:     egressAccount{&p.outward.held},
			Reached:  p.bound,
		},
		Log: s.log,
		Count: func(protocol, verdict string) {
			owner := p.owner()
			owner.egress.of(egressResult{protocol, verdict}, func(r egressResult) prometheus.Counter {
				return owner.counter(s.metrics.egress, r.protocol, r.verdict)
			}).Inc()
		},
		Limited: func(r *limit.Refusal) {
			if pol := p.policy.Load(); pol != nil {
				pol.limited.count(r.Breaker, r.Rule, r.Reason)
			}
		},
		Harmed: func(by fault.Injected) {
			if pol := p.policy.Load(); pol != nil {
				pol.harmed.count(by.Injection, by.Rule, by.Kind.String())
			}
		},
		Panicked: s.metrics.panics.Inc,
	})
}

// ServeEgress accepts the pod's redirected connections to other hosts on l, which it
// closes. They are egress.Conns. It returns nil after Drain or Shutdown began, and may
// be called for several listeners.
func (p *Pod) ServeEgress(l net.Listener) error { return p.egress.Serve(l) }

// isAPIServer tells whether an address is the apiserver's: whoever is redirected
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
