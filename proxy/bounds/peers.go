package bounds

import (
	"net/netip"
	"sync"
)

// Peers divides a pool among the peers of a listener, as a Pool is divided among pods. It is
// safe for concurrent use.
type Peers struct {
	Pool *Pool
	// Own is what each peer may use, however much the others do.
	Own int64

	mu    sync.Mutex
	peers map[netip.Addr]*peer // with open shares
}

type peer struct {
	Account
	shares int
}

// Share is what one request or connection of a peer uses. Its methods must not be called
// concurrently.
type Share struct {
	peers *Peers
	of    netip.Addr
	*peer
	taken int64
}

// Open returns a share that uses nothing yet. The caller closes it.
func (p *Peers) Open(of netip.Addr) *Share {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.peers[of]
	if known == nil {
		known = &peer{Account: Account{Pool: p.Pool, Own: p.Own}}
		if p.peers == nil {
			p.peers = map[netip.Addr]*peer{}
		}
		p.peers[of] = known
	}
	known.shares++
	return &Share{peers: p, of: of, peer: known}
}

// Take takes n until Close, and reports whether the total of the peer is within bounds.
func (s *Share) Take(n int64) bool {
	s.taken += n
	return s.peer.Take(n)
}

// Of returns the account of the peer, which is safe for concurrent use. What is taken from it
// must be given back to it.
func (s *Share) Of() *Account { return &s.Account }

// Close gives back all that was taken by Take.
func (s *Share) Close() {
	s.Give(s.taken)
	s.peers.mu.Lock()
	defer s.peers.mu.Unlock()
	if s.shares--; s.shares == 0 {
		delete(s.peers.peers, s.of)
	}
}

// Taken returns what all peers have taken now.
func (p *Peers) Taken() (n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.peers {
		n += one.Taken()
	}
	return n
}
