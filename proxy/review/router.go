package review

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/review/route"
)

// maxRead bounds what is read of a review before it is sent. A review of which that is not
// the whole is streamed, and sent once.
const maxRead = 1 << 20

var (
	// errSent means that a request cannot be sent again.
	errSent = errors.New("the review was sent to another pod, which did not answer")
	// errDown means that the agent of another pod answered instead of the application.
	errDown = errors.New("the application of the other pod does not answer")
)

// request is one request of the apiserver.
type request struct {
	local    netip.AddrPort // where the apiserver connected to
	name     string         // the server name that it used
	received bool           // another pod sent it
}

type requestKey struct{}

// router is a RoundTripper that sends each review where it is answered.
type router struct{ *Server }

// RoundTrip implements http.RoundTripper.
func (s router) RoundTrip(r *http.Request) (*http.Response, error) {
	x := r.Context().Value(requestKey{}).(*request) //nolint:forcetypeassert // ServeHTTP sets it
	from := io.Reader(http.NoBody)
	if r.Body != nil {
		from = r.Body
	}
	b, err := begin(from, maxRead)
	if err != nil {
		return nil, fmt.Errorf("reading the review: %w", err)
	}
	head, failed := route.Read(b.head)
	routes := s.routes.Load()
	if failed != nil || routes == nil || r.Method != http.MethodPost { // the application decides what it is
		return s.toApplication(r, x, b)
	}
	switch decision := routes.Decide(head, x.received); decision.Action {
	case route.Allow:
		s.Count(Allowed)
		return allowed(r, route.Allowed(head)), nil
	case route.Forward:
		return s.forward(r, x, b, routes, decision.Shard)
	}
	return s.toApplication(r, x, b)
}

// toApplication sends a request to the application in this pod.
func (s router) toApplication(r *http.Request, x *request, b *body) (*http.Response, error) {
	s.Count(Local)
	return s.targets.application.send(to(r, x.local), b)
}

// forward sends a review to a ready pod of the owner, and to the application if none
// answers.
func (s router) forward(r *http.Request, x *request, b *body, routes *Routes, shard string) (*http.Response, error) {
	if pool := routes.Authorities[x.name]; pool != nil {
		if resp := s.tryPods(r, x, b, routes.Pods[shard], pool); resp != nil {
			s.Count(Forwarded)
			return resp, nil
		}
	}
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	s.Count(Unreachable)
	return s.targets.application.send(to(r, x.local), b)
}

// tryPods returns the response of the first pod that answers, nil if none does.
func (s router) tryPods(r *http.Request, x *request, b *body, pods []netip.Addr, pool *x509.CertPool) *http.Response {
	target := s.targets.other(x.name, pool)
	deadline := time.Now().Add(reachWithin(r.URL.Query()))
	pods = s.avoided.choose(pods, x.local.Addr())
	again := map[netip.Addr]bool{} // pods whose connection was lost: another may work
	for i := 0; i < len(pods); i++ {
		pod, left := pods[i], time.Until(deadline)
		if left <= 0 {
			return nil
		}
		out := to(r, netip.AddrPortFrom(pod, x.local.Port()))
		out.Header[meshv1.ForwardedHeader] = []string{"1"}
		resp, reached, err := target.reach(out, b, left/time.Duration(len(pods)-i))
		if err == nil && resp.Header.Get(meshv1.ForwardedHeader) == "" {
			return resp
		}
		if err == nil {
			_ = resp.Body.Close()
			err = errDown
		}
		if r.Context().Err() != nil || errors.Is(err, errSent) {
			return nil // a client that leaves says nothing about the pod
		}
		switch {
		case !reached:
			s.avoided.add(pod)
		case !errors.Is(err, errDown) && !again[pod]:
			again[pod], pods = true, append(pods, pod)
		}
		s.Log.Debug("failed to forward a review", "pod", s.Pod, "to", pod.String(), "error", err)
	}
	return nil
}

// to returns a copy of a request that is sent to an address.
func to(r *http.Request, at netip.AddrPort) *http.Request {
	out := r.Clone(r.Context())
	out.URL.Scheme, out.URL.Host = "https", at.String()
	return out
}

// allowed returns a response with a body of JSON.
func allowed(r *http.Request, body []byte) *http.Response {
	// The apiserver may wait until all of its review was read.
	_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, 8*maxRead))
	return &http.Response{
		StatusCode: http.StatusOK, ProtoMajor: 1, ProtoMinor: 1, Request: r,
		Header:        http.Header{"Content-Type": {"application/json"}, "Content-Length": {strconv.Itoa(len(body))}},
		ContentLength: int64(len(body)), Body: io.NopCloser(bytes.NewReader(body)),
	}
}
