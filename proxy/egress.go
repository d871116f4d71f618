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
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

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
