package proxy

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// What the filters of one pod may keep of lists and of large objects, in bytes, if
// those of no other keep as much.
const (
	maxFiltered = 64 << 20
	ownFiltered = 4 << 20
)

// filter makes an answer one of the shard's objects alone. It is false when the
// client was answered otherwise.
func (x *exchange) filter(resp *http.Response) bool {
	if resp.StatusCode/100 != 2 || x.req.method == http.MethodHead {
		return true // no objects
	}
	plain, err := decoded(resp)
	if err == nil {
		x.objects, err = filter.New(plain, x.keep, filter.Options{
			ContentType:   resp.Header.Get("Content-Type"),
			Watch:         x.narrow.watch,
			ShardSelector: x.shardSelector,
			Hold:          x.holdFiltered,
		})
	}
	if err != nil {
		x.unfiltered(err)
		return false
	}
	body := io.Reader(x.objects)
	if !x.narrow.watch {
		// What is wrong with the first of a list can still be said.
		begun := bufio.NewReaderSize(x.objects, 4<<10)
		if _, err := begun.Peek(1); err != nil {
			x.unfiltered(err)
			return false
		}
		body = begun
	}
	resp.Body = filtered{body, resp.Body}
	resp.ContentLength = -1
	delete(resp.Header, "Content-Length")
	delete(resp.Header, "Content-Encoding")
	return true
}

// keep tells whether an object of the answer is passed on.
func (x *exchange) keep(k filter.Key) bool {
	if x.narrow.by != byNamespace || len(k.Namespace) > 0 {
		x.judged.Store(true)
	}
	return x.narrow.keep(k)
}

// filtered is a filtered body.
type filtered struct {
	io.Reader
	io.Closer
}

// decoded is an answer's body as it was before it was compressed. The apiserver
// does not compress unasked, but others may be in between.
func decoded(resp *http.Response) (io.Reader, error) {
	switch encoding := resp.Header.Get("Content-Encoding"); encoding {
	case "", "identity":
		return resp.Body, nil
	case "gzip":
		r, err := gzip.NewReader(resp.Body)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", filter.ErrForm, err)
		}
		return r, nil
	default:
		return nil, fmt.Errorf("%w: encoding %q", filter.ErrType, encoding)
	}
}

// holdFiltered takes n bytes that a filter keeps until the request is over.
func (x *exchange) holdFiltered(n int) error {
	x.filtered += int64(n)
	if x.pod.filtered.take(int64(n)) {
		return nil
	}
	x.pod.bound("filtered bytes")
	return status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1,
		"pod %s asks for more %s than can be filtered at once: list in pieces (limit), or as JSON", x.pod.id, x.req.info.Resource)
}

// unfiltered answers for an answer that was not filtered, and so is not passed on.
func (x *exchange) unfiltered(err error) {
	refused, isRefusal := errors.AsType[*apierrors.StatusError](err)
	switch {
	case isRefusal:
		x.refuse(refusalReason(refused), refused)
	case errors.Is(err, filter.ErrType), errors.Is(err, filter.ErrSize):
		refused := status.NotAcceptable("%s are divided among shards, and the apiserver's answer cannot be filtered: %v: accept JSON, or list in pieces (limit)", x.req.info.Resource, err)
		x.refuse(refusalReason(refused), refused)
	case errors.Is(err, filter.ErrForm):
		x.plan.meters.upstreamErrors.Inc()
		x.answer(status.New(http.StatusBadGateway, "BadGateway", 0, "the apiserver's answer is no list of %s: %v", x.req.info.Resource, err))
	default:
		x.failed(err)
	}
}
