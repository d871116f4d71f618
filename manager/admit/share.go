package admit

import (
	"context"
	"net/netip"
	"sync"

	"golang.org/x/sync/semaphore"
)

// Share bounds what requests use while they are handled, per peer and in total. A
// request above its peer's part waits for other requests of that peer alone.
type Share struct {
	// Total is what there is, PerPeer what one address has at most.
	Total, PerPeer int64

	mu    sync.Mutex
	total *semaphore.Weighted
	peers map[netip.Addr]*sharer
}

type sharer struct {
	share *semaphore.Weighted
	users int
}

// Acquire waits for a weight, which must not exceed PerPeer, until the context ends.
func (s *Share) Acquire(ctx context.Context, peer netip.Addr, weight int64) (release func(), err error) {
	own := s.enter(peer)
	if err := own.share.Acquire(ctx, weight); err != nil {
		s.leave(peer)
		return nil, err
	}
	if err := s.total.Acquire(ctx, weight); err != nil {
		own.share.Release(weight)
		s.leave(peer)
		return nil, err
	}
	return func() {
		s.total.Release(weight)
		own.share.Release(weight)
		s.leave(peer)
	}, nil
}

func (s *Share) enter(peer netip.Addr) *sharer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.total == nil {
		s.total, s.peers = semaphore.NewWeighted(s.Total), map[netip.Addr]*sharer{}
	}
	own := s.peers[peer]
	if own == nil {
		own = &sharer{share: semaphore.NewWeighted(s.PerPeer)}
		s.peers[peer] = own
	}
	own.users++
	return own
}

func (s *Share) leave(peer netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if own := s.peers[peer]; own.users > 1 {
		own.users--
	} else {
		delete(s.peers, peer)
	}
}
