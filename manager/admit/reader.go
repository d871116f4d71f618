package admit

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/time/rate"
	"k8s.io/utils/lru"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

// Rates of the reads that admission makes of the apiserver.
const (
	readsPerNamespace, readsPerNamespaceBurst = 50, 200
	readsPerPeer, readsPerPeerBurst           = 100, 400
	reads, readsBurst                         = 200, 400
	maxLimiters                               = 1024 // of peers, and of namespaces, that are remembered
)

// Reader limits the rate of reads: for the reviews of a peer about one namespace, for a peer, and
// in total. All reviews may come from one peer, the apiserver, and pods can send reviews about any
// namespace. A read above one of the first two rates fails at once; one above the total rate
// waits, so that it costs others a delay alone.
type Reader struct {
	client.Reader

	total      *rate.Limiter
	mu         sync.Mutex
	peers      *lru.Cache // a *rate.Limiter for each netip.Addr
	namespaces *lru.Cache // and for each subject
}

// subject is what the reviews of a peer are about.
type subject struct {
	peer      netip.Addr
	namespace string
}

// NewReader returns a Reader that reads through another.
func NewReader(through client.Reader) *Reader {
	return &Reader{Reader: through, total: rate.NewLimiter(reads, readsBurst), peers: lru.New(maxLimiters), namespaces: lru.New(maxLimiters)}
}

type namespaceKey struct{}

// WithNamespace has a [Reader] know which namespace the reviews that a handler answers are about.
func WithNamespace(h admission.Handler) admission.Handler {
	return admission.HandlerFunc(func(ctx context.Context, r admission.Request) admission.Response {
		return h.Handle(context.WithValue(ctx, namespaceKey{}, r.Namespace), r)
	})
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
	s := subject{peer: PeerOf(ctx)}
	s.namespace, _ = ctx.Value(namespaceKey{}).(string)
	peer := r.limiter(r.peers, s.peer, readsPerPeer, readsPerPeerBurst)
	switch {
	case peer.Tokens() < 1: // before it adds namespaces that it may have invented
	case !r.limiter(r.namespaces, s, readsPerNamespace, readsPerNamespaceBurst).Allow():
		metrics.RequestsRefused.WithLabelValues(Webhooks.Name, "rate").Inc()
		return fmt.Errorf("admission reviews about namespace %q come too fast: try again later", s.namespace)
	case peer.Allow():
		return r.total.Wait(ctx)
	}
	metrics.RequestsRefused.WithLabelValues(Webhooks.Name, "rate").Inc()
	return fmt.Errorf("admission reviews from %s come too fast: try again later", s.peer)
}

// limiter returns one of the limiters. One with all its tokens is like a new one, so that those
// are forgotten first.
func (r *Reader) limiter(of *lru.Cache, key any, perSecond rate.Limit, burst int) *rate.Limiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l, ok := of.Get(key); ok {
		return l.(*rate.Limiter)
	}
	l := rate.NewLimiter(perSecond, burst)
	of.Add(key, l)
	return l
}
