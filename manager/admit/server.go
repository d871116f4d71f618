// Package admit serves the manager's HTTP ports (webhooks, metrics and health) so
// that no client can exhaust the manager or keep others waiting.
//
// Pods can reach these ports. Every bound is per peer and in total, and the total is
// shared fairly: if it is reached, the peer that has the most loses first.
package admit

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/listen"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

const (
	// maxHeaders has room for a token.
	maxHeaders = 16 << 10
	// headersWithin bounds the TLS handshake, too.
	headersWithin = 10 * time.Second
	idleFor       = 90 * time.Second
)

// Port is a port of the manager.
type Port struct {
	// Name of the port, for metrics.
	Name string
	// Conns and ConnsPerPeer bound its open connections.
	Conns, ConnsPerPeer int
	// Within bounds the time in which a request is read, and the one in which it is
	// answered.
	Within time.Duration
}

// Ports of the manager. An apiserver has one connection for all admission reviews in
// HTTP/2; a proxy may stand for all of a cluster's apiservers.
var (
	Webhooks = Port{Name: "webhook", Conns: 256, ConnsPerPeer: 64, Within: 10 * time.Second}
	Metrics  = Port{Name: "metrics", Conns: 64, ConnsPerPeer: 8, Within: 30 * time.Second}
	Health   = Port{Name: "health", Conns: 64, ConnsPerPeer: 16, Within: 5 * time.Second}
)

// Listen listens at an address, within the bounds of the port.
func (p Port) Listen(ctx context.Context, address string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return listen.Limit(l, listen.Bounds{
		Total: p.Conns, PerPeer: p.ConnsPerPeer,
		Refused: func(r listen.Refusal) { metrics.ConnectionsRefused.WithLabelValues(p.Name, string(r.Bound)).Inc() },
	}), nil
}

// Server serves the port. The handler finds the peer by PeerOf.
func (p Port) Server(handler http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           withPeer(handler),
		MaxHeaderBytes:    maxHeaders,
		ReadHeaderTimeout: headersWithin,
		ReadTimeout:       p.Within,
		WriteTimeout:      2 * p.Within,
		IdleTimeout:       idleFor,
		// Of a hostile client each failed handshake is a line.
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		// What a connection makes the server store before a handler reads it.
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          64,
			MaxReceiveBufferPerConnection: 256 << 10,
			MaxReceiveBufferPerStream:     128 << 10,
		},
	}
}

type peerKey struct{}

func withPeer(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		remote, _ := netip.ParseAddrPort(r.RemoteAddr)
		ctx := context.WithValue(r.Context(), peerKey{}, remote.Addr().Unmap().WithZone(""))
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// PeerOf returns the address of the client whose request a context is of; the zero
// Addr if it is of none.
func PeerOf(ctx context.Context) netip.Addr {
	peer, _ := ctx.Value(peerKey{}).(netip.Addr)
	return peer
}
