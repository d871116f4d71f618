package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ctrlmesh/ctrlmesh/internal/listen"
)

// Bounds of the server of health and metrics. Every pod of the cluster can connect
// to it without authentication.
const (
	// maxEndpointConnections are open at once, each with a head at most. The oldest
	// gives way to a new one: no number of them keeps out the kubelet or Prometheus.
	maxEndpointConnections = 256
	maxEndpointPerPeer     = 32
	// maxEndpointHeader is in bytes; net/http adds 4 KiB.
	maxEndpointHeader = 16 << 10

	endpointReadTimeout  = 5 * time.Second // of a whole request
	endpointWriteTimeout = 10 * time.Second
	endpointIdleTimeout  = 60 * time.Second // Prometheus usually asks again in time
)

// Serve serves requests on l until ctx ends. refused, if not nil, is called for each
// connection that a bound closed.
func Serve(ctx context.Context, l net.Listener, h http.Handler, refused func(listen.Refusal)) error {
	l = listen.Limit(l, listen.Bounds{Total: maxEndpointConnections, PerPeer: maxEndpointPerPeer, Replace: true, Refused: refused})
	server := &http.Server{
		Handler:           h,
		MaxHeaderBytes:    maxEndpointHeader,
		ReadTimeout:       endpointReadTimeout,
		ReadHeaderTimeout: endpointReadTimeout,
		WriteTimeout:      endpointWriteTimeout,
		IdleTimeout:       endpointIdleTimeout,
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving health and metrics: %w", err)
	}
	return nil
}

// ServeReady answers every request at address until ctx ends.
func ServeReady(ctx context.Context, address string) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listening for probes: %w", err)
	}
	return Serve(ctx, l, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), nil)
}

// Handler answers the kubelet and Prometheus. healthy and ready return why the agent is
// not. They must not block: requests need no authentication, and any number of them must not
// delay the pods.
func Handler(healthy, ready func() error, metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /healthz", probe(healthy))
	mux.Handle("GET /readyz", probe(ready))
	mux.Handle("GET /metrics", &exposition{gatherer: metrics})
	return mux
}

// probe answers 503 with the error, if there is one.
func probe(check func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err := check(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
}
