package push

import (
	"context"
	"net/netip"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// gate bounds the number of concurrent TokenReviews. Only a peer that exceeds its own
// bound is rejected: pods can reach the manager too, and one that sends invalid tokens must
// not block an agent.
type gate struct {
	once  sync.Once
	slots chan struct{} // served in the order of arrival

	mu    sync.Mutex
	calls map[string]int // under way or waiting, by peer
}

func (g *gate) enter(ctx context.Context) (leave func(), err error) {
	g.once.Do(func() {
		g.slots, g.calls = make(chan struct{}, maxReviews), map[string]int{}
	})
	who := address(ctx)
	g.mu.Lock()
	if g.calls[who] >= maxCallsPerPeer {
		g.mu.Unlock()
		return nil, status.Error(codes.ResourceExhausted, "too many calls at once from this address")
	}
	g.calls[who]++
	g.mu.Unlock()
	forget := func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.calls[who]--; g.calls[who] == 0 {
			delete(g.calls, who)
		}
	}
	select {
	case g.slots <- struct{}{}:
		return func() { <-g.slots; forget() }, nil
	case <-ctx.Done():
		forget()
		return nil, ctx.Err()
	}
}

// address of the peer, without its port.
func address(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	if ap, err := netip.ParseAddrPort(p.Addr.String()); err == nil {
		return ap.Addr().Unmap().WithZone("").String()
	}
	return p.Addr.String()
}
