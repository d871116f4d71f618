package proxy

import (
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/review"
)

// Bounds of the memory of the reviews of one client in bytes, if no other client uses as much.
const (
	maxReviews = 32 << 20 // three hundred small ones, ten of 1 MiB
	ownReviews = 512 << 10
)

// newReviews returns the server of the connections to the pod's webhook. Neither their
// connections nor their memory are those of the pod's own requests: any pod of the cluster may
// be a client of the webhook.
func newReviews(p *Pod) *review.Server {
	s := p.server
	conns := s.reviewConns.Conns(p.bound)
	conns.Open.Own = review.MaxOpen
	conns.Peers = s.reviewConns.PerPeer()
	return review.NewServer(review.Config{
		Pod:   p.env.ID,
		Dial:  p.dial,
		Conns: conns,
		Held:  &bounds.Peers{Pool: s.reviewed, Own: ownReviews},
		Log:   s.log,
		Count: func(decision string) { p.workload().Reviewed(s.metrics, decision) },
	})
}

// Reviews returns the server of the connections to the pod's webhook. It serves none until
// its Serve is called, and ends with the pod.
func (p *Pod) Reviews() *review.Server { return p.reviews }
