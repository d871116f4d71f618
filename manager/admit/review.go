package admit

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/listen"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

const (
	// maxReview has room for an object that etcd takes, in JSON, twice: an update
	// brings the old one along.
	maxReview = 7 << 20
	// maxReviews bounds the bodies that are stored at once.
	maxReviews = 16 << 20
	// perElement is what an object, or an element of a list, costs to decode, whatever its text:
	// both {} and null become a container in the list of a pod.
	perElement = 1 << 10
	// perText is what a text in a list, or a member of an object, costs to decode. A valid review
	// has many of them.
	perText = 1 << 8
	// maxDecoding and maxDecodingPerPeer bound the weight of reviews that are decoded
	// and answered at once.
	maxDecoding, maxDecodingPerPeer = 64 << 20, 32 << 20
	// baseHead is the memory of a request besides its head and its body: an HTTP/2 connection has
	// many requests at once.
	baseHead = 16 << 10
	// baseWeight is that of the smallest review: 64 of them are answered at once.
	baseWeight = 1 << 20
)

// Reviews bounds the requests to a handler of admission reviews.
type Reviews struct {
	// Handler answers reviews.
	Handler http.Handler
	// Within is how long one may take.
	Within time.Duration
	Log    *slog.Logger

	bodies Bodies
	share  Share
}

// NewReviews bounds a handler by defaults.
func NewReviews(handler http.Handler, log *slog.Logger) *Reviews {
	return &Reviews{
		Handler: handler, Within: Webhooks.Within, Log: log,
		bodies: Bodies{Each: maxReview, Total: maxReviews},
		share:  Share{Total: maxDecoding, PerPeer: maxDecodingPerPeer},
	}
}

// ServeHTTP implements http.Handler.
func (h *Reviews) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), h.Within)
	defer cancel()
	peer := PeerOf(ctx)
	if r.Method != http.MethodPost {
		http.Error(w, "only POST is served", http.StatusMethodNotAllowed)
		return
	}
	abort := func() { _ = http.NewResponseController(w).SetReadDeadline(time.Now()) }
	body, forget, err := h.bodies.Read(peer, baseHead+listen.HeadWeight(r.Header, 1), r.Body, abort)
	if err != nil {
		h.refuseBody(w, err)
		return
	}
	defer forget()
	weight := weigh(body)
	if weight > h.share.PerPeer {
		h.refuse(w, http.StatusRequestEntityTooLarge, "size", "the review has too many parts")
		return
	}
	release, err := h.share.Acquire(ctx, peer, weight)
	if err != nil {
		h.refuse(w, http.StatusServiceUnavailable, "concurrency", "too many reviews are under way")
		return
	}
	defer release()
	r = r.WithContext(ctx)
	r.Body = io.NopCloser(bytes.NewReader(body))
	h.Handler.ServeHTTP(w, r)
}

func (h *Reviews) refuseBody(w http.ResponseWriter, err error) {
	switch {
	case errors.Is(err, errTooLarge):
		h.refuse(w, http.StatusRequestEntityTooLarge, "size", err.Error())
	case errors.Is(err, errEvicted):
		h.refuse(w, http.StatusServiceUnavailable, "memory", err.Error())
	default: // the client left, or was too slow
		http.Error(w, "reading the body failed", http.StatusBadRequest)
	}
}

func (h *Reviews) refuse(w http.ResponseWriter, code int, bound, message string) {
	metrics.RequestsRefused.WithLabelValues(Webhooks.Name, bound).Inc()
	h.Log.Debug("refused an admission review", "bound", bound)
	http.Error(w, message, code)
}

// weigh estimates the memory that it takes to decode a review.
func weigh(review []byte) int64 {
	weight := int64(len(review))
	first := false // the next byte begins an element of a list or a member of an object
	for i := 0; i < len(review); i++ {
		switch review[i] {
		case ' ', '\t', '\r', '\n':
			continue
		case '{', '[':
			weight += perElement
			first = true
			continue
		case ',':
			first = true
			continue
		case '"':
			if first {
				weight += perText
			}
			for i++; i < len(review) && review[i] != '"'; i++ {
				if review[i] == '\\' {
					i++
				}
			}
		case '}', ']', ':':
		default:
			if first {
				weight += perElement
			}
		}
		first = false
	}
	return max(baseWeight, weight)
}

// Scrapes bounds the requests to a handler of metrics: each gathers all of them.
func Scrapes(handler http.Handler) http.Handler {
	share := &Share{Total: 8, PerPeer: 2}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), Metrics.Within)
		defer cancel()
		release, err := share.Acquire(ctx, PeerOf(ctx), 1)
		if err != nil {
			metrics.RequestsRefused.WithLabelValues(Metrics.Name, "concurrency").Inc()
			http.Error(w, "too many scrapes are under way", http.StatusServiceUnavailable)
			return
		}
		defer release()
		handler.ServeHTTP(w, r)
	})
}
