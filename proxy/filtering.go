package proxy

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// respond removes the objects of other shards from a response.
func (s *narrowStage) respond(x *state, resp *upstream.Response) *outcome {
	if resp.Status/100 != 2 || x.req.method == http.MethodHead {
		return nil // no objects
	}
	plain, err := decoded(resp)
	if err == nil {
		x.objects, err = filter.New(plain, func(k filter.Key) bool { return s.keep(x, k) }, filter.Options{
			ContentType:   resp.Get("Content-Type"),
			Watch:         s.watch,
			ShardSelector: x.shardSelector,
			Hold:          func(n int) error { return x.holdFiltered(s.resource.Resource, n) },
		})
	}
	if err != nil {
		return s.unfiltered(x, err)
	}
	body := io.Reader(x.objects)
	if !s.watch {
		// An error at the beginning of a list can still be answered.
		begun := bufio.NewReaderSize(x.objects, 4<<10)
		if _, err := begun.Peek(1); err != nil {
			return s.unfiltered(x, err)
		}
		body = begun
	}
	resp.Replace(body)
	delete(resp.Header, "Content-Encoding")
	return nil
}

// decoded returns the body of a response without compression. The apiserver does not
// compress unless asked, but a proxy in between may.
func decoded(resp *upstream.Response) (io.Reader, error) {
	switch encoding := resp.Get("Content-Encoding"); encoding {
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

// unfiltered answers in place of a response that cannot be filtered.
func (s *narrowStage) unfiltered(x *state, err error) *outcome {
	refused, isRefusal := errors.AsType[*apierrors.StatusError](err)
	switch {
	case isRefusal:
		return refusal(refused)
	case errors.Is(err, filter.ErrType), errors.Is(err, filter.ErrSize):
		return refusal(status.NotAcceptable("%s are divided among shards, and the response of the apiserver cannot be filtered: %v: accept JSON, or list in pieces (limit)", s.resource.Resource, err))
	case errors.Is(err, filter.ErrForm):
		x.plan.meters.UpstreamErrors.Inc()
		return &outcome{kind: respond, status: status.New(http.StatusBadGateway, "BadGateway", 0, "the response of the apiserver is no list of %s: %v", s.resource.Resource, err)}
	}
	return failure(err)
}
