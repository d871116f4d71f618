package proxy

import (
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/review"
)

// newReviews returns the server of the connections to the pod's webhook. They have accounts
// of their own, so that the clients of the webhook keep the pod from nothing else.
func newReviews(p *Pod) *review.Server {
	s := p.server
	return review.NewServer(review.Config{
		Pod:   p.env.ID,
		Dial:  p.dial,
		Conns: s.conns.Conns(p.bound),
		Held:  &bounds.Account{Pool: s.long, Own: pipeline.OwnLong},
		Log:   s.log,
		Count: func(decision string) { p.workload().Reviewed(s.metrics, decision) },
	})
}

// Reviews returns the server of the connections to the pod's webhook. It serves none until
// its Serve is called, and ends with the pod.
func (p *Pod) Reviews() *review.Server { return p.reviews }
