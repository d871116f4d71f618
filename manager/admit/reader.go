package admit

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/time/rate"
	"k8s.io/utils/lru"
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

	total *rate.Limiter
	mu    sync.Mutex
	peers *lru.Cache // a *rate.Limiter for each netip.Addr
}

// NewReader returns a Reader that reads through another.
func NewReader(through client.Reader) *Reader {
	return &Reader{Reader: through, total: rate.NewLimiter(reads, readsBurst), peers: lru.New(maxPeers)}
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
	if l, ok := r.peers.Get(peer); ok {
		return l.(*rate.Limiter)
	}
	l := rate.NewLimiter(readsPerPeer, readsPerPeerBurst)
	r.peers.Add(peer, l)
	return l
}
