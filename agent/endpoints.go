package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ctrlmesh/ctrlmesh/agent/certs"
	"github.com/ctrlmesh/ctrlmesh/internal/listen"
)

// Bounds of the server of health and metrics. Every pod of the cluster can connect
// to it, and nobody authenticates.
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

// serveEndpoints serves requests on l until ctx ends.
func serveEndpoints(ctx context.Context, l net.Listener, h http.Handler, refused func(listen.Refusal)) error {
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
	return serveEndpoints(ctx, l, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), nil)
}

// endpoints are what the kubelet and Prometheus ask for. They do not enter the loop,
// so that requests without end cost the pods nothing.
func endpoints(m *mesh, keeper *certs.Keeper, registry *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if _, err := m.lastTurn(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		err := m.ready()
		if err == nil {
			_, err = keeper.Current()
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	mux.Handle("GET /metrics", newExposition(registry))
	return mux
}

// loopStalledAfter is how long the loop may take for one turn. Idle, it takes one
// each lookInterval.
const loopStalledAfter = 3 * time.Second

// turn is what the loop last left behind.
type turn struct {
	ended   time.Time
	phase   phase
	missing error // what pods wait for that only the loop knows
}

// noteTurn is called by the loop after each turn.
func (m *mesh) noteTurn() {
	t := &turn{ended: time.Now(), phase: m.phase}
	switch {
	case m.cluster == nil:
		t.missing = errors.New("waiting for the manager to name the apiserver's addresses")
	case !m.redirected:
		t.missing = errors.New("the apiserver's addresses are not redirected yet")
	}
	m.turn.Store(t)
}

// lastTurn returns an error if the loop has stalled.
func (m *mesh) lastTurn() (*turn, error) {
	t := m.turn.Load()
	switch {
	case t == nil:
		return nil, errors.New("the agent's loop has not started")
	case time.Since(t.ended) > loopStalledAfter:
		return nil, errors.New("the agent's loop is stuck")
	}
	return t, nil
}

// ready returns what is missing before pods can be served. It does not enter the loop.
func (m *mesh) ready() error {
	t, err := m.lastTurn()
	switch {
	case err != nil:
		return err
	case t.phase == stopped:
		return errors.New("told to stop")
	case t.phase >= yielded:
		return errors.New("handed over to another agent")
	case t.missing != nil:
		return t.missing
	case !m.watcher.Synced():
		return errors.New("waiting for the list of this node's pods")
	case t.phase == handing:
		return nil
	}
	return m.health.ready()
}
