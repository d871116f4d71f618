package admit

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

// Rates of the apiserver's answers to reads that admission makes.
const (
	readsPerPeer, readsPerPeerBurst = 50, 200
	reads, readsBurst               = 200, 400
	maxPeers                        = 1024 // whose rates are remembered
)

// Reader limits the rate of reads, per peer and in total. A read above its peer's rate
// fails at once; one above the total rate waits, so that it costs others a delay alone.
type Reader struct {
	client.Reader

	once  sync.Once
	total *rate.Limiter
	mu    sync.Mutex
	peers map[netip.Addr]*rate.Limiter
}

// Get implements client.Reader.
func (r *Reader) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	return r.Reader.Get(ctx, key, o, opts...)
}

// List implements client.Reader.
func (r *Reader) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	return r.Reader.List(ctx, list, opts...)
}

func (r *Reader) wait(ctx context.Context) error {
	r.once.Do(func() {
		r.total, r.peers = rate.NewLimiter(reads, readsBurst), map[netip.Addr]*rate.Limiter{}
	})
	peer := PeerOf(ctx)
	if !r.limiter(peer).Allow() {
		metrics.RequestsRefused.WithLabelValues(Webhooks.Name, "rate").Inc()
		return fmt.Errorf("admission reviews from %s come too fast: try again later", peer)
	}
	return r.total.Wait(ctx)
}

// limiter returns the limiter of a peer. That of a peer with all its tokens is like a
// new one, so that those are forgotten first.
func (r *Reader) limiter(peer netip.Addr) *rate.Limiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.peers[peer]; l != nil {
		return l
	}
	if len(r.peers) >= maxPeers {
		now := time.Now()
		for p, l := range r.peers {
			if l.TokensAt(now) >= readsPerPeerBurst {
				delete(r.peers, p)
			}
		}
	}
	for p := range r.peers {
		if len(r.peers) < maxPeers {
			break
		}
		delete(r.peers, p)
	}
	l := rate.NewLimiter(readsPerPeer, readsPerPeerBurst)
	r.peers[peer] = l
	return l
}
