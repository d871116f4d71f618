package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/upstream"
)

// Bounds of what one pod can make the proxy hold.
const (
	maxConnections   = 1024
	maxStreams       = 512 // of one HTTP/2 connection
	maxHeaderBytes   = 1 << 20
	headerTimeout    = 10 * time.Second // the TLS handshake too
	downstreamIdle   = 120 * time.Second
	receivePerStream = 256 << 10
)

var errShutdown = errors.New("the proxy of this pod shuts down")

// PodInfo names a pod.
type PodInfo struct{ UID, Namespace, Name string }

// DialFunc connects from a pod's network namespace. addr is a literal IP and port.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// Pod is one captured pod. Its methods are safe for concurrent use.
type Pod struct {
	server *Server
	info   PodInfo
	id     string // namespace/name
	dial   DialFunc
	http   *http.Server

	// done ends when Shutdown begins: long-running answers end then.
	done context.Context
	end  context.CancelCauseFunc

	clients atomic.Pointer[clients]
	policy  atomic.Pointer[policy]
	ledger  ledger
	names   resourceNames
	leader  atomic.Int64 // Unix nanoseconds until when the lock is held
}

// clients are the pod's ways upstream. The lock has one of its own, so that a
// renewal never waits for anything else.
type clients struct{ main, lock *upstream.Client }

func newPod(s *Server, info PodInfo, dial DialFunc) *Pod {
	p := &Pod{server: s, info: info, id: info.Namespace + "/" + info.Name, dial: dial}
	p.done, p.end = context.WithCancelCause(context.Background())
	p.http = &http.Server{
		Handler:           p,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       downstreamIdle,
		MaxHeaderBytes:    maxHeaderBytes,
		// OPTIONS * is for the handler to refuse, not for net/http to answer.
		DisableGeneralOptionsHandler: true,
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:      maxStreams,
			MaxReceiveBufferPerStream: receivePerStream,
		},
		TLSConfig: &tls.Config{
			MinVersion:                  tls.VersionTLS12,
			DynamicRecordSizingDisabled: true, // loopback: there is no packet to fit a record into
			GetCertificate:              func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.leaf() },
		},
	}
	return p
}

// SetPolicy puts a policy in force for every request that starts after it
// returns. Watches that it would have narrowed otherwise are ended, and the
// client's caches told to list again. So are they by the first policy: nobody
// knows what they were filled under. On an error the last good policy stays.
func (p *Pod) SetPolicy(m *meshv1.PodPolicy) error { return p.put(m, time.Now()) }

// Restore is SetPolicy for a first policy that an earlier proxy of this pod had
// in force since the given time, zero for long ago: caches go on from where they
// are. If it came only just before that proxy ended, they may not have been told
// of it, and are now. After another policy it is the same as SetPolicy.
func (p *Pod) Restore(m *meshv1.PodPolicy, since time.Time) error { return p.put(m, since) }

func (p *Pod) put(m *meshv1.PodPolicy, since time.Time) error {
	next, err := compile(p, m)
	if err != nil {
		return err
	}
	p.ledger.change(p, next, since)
	return nil
}

// Version of the policy in force; "" before the first.
func (p *Pod) Version() string {
	if pol := p.policy.Load(); pol != nil {
		return pol.version
	}
	return ""
}

// LockHolder tells whether the pod holds its shard's lock: its last successful
// write of it named a holder, no longer ago than the lease lasts.
func (p *Pod) LockHolder() bool { return time.Now().UnixNano() < p.leader.Load() }

func (p *Pod) holds(holder string, lease time.Duration) {
	if holder == "" {
		p.leader.Store(0)
		return
	}
	p.leader.Store(time.Now().Add(lease).UnixNano())
}

// Serve accepts TLS connections on l, which it closes. It returns nil after
// Shutdown, and may be called for several listeners.
func (p *Pod) Serve(l net.Listener) error {
	err := p.http.ServeTLS(netutil.LimitListener(l, maxConnections), "", "")
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Shutdown ends everything of the pod: listeners close, connections get GOAWAY,
// watches and upgrades end, short requests finish. What is left when ctx is done
// is cut, and its error returned.
func (p *Pod) Shutdown(ctx context.Context) error {
	defer p.server.remove(p)
	p.http.RegisterOnShutdown(func() { p.end(errShutdown) })
	err := p.http.Shutdown(ctx)
	if err != nil {
		_ = p.http.Close()
	}
	return err
}

func (p *Pod) setCluster(c *upstream.Cluster) {
	var next *clients
	if c != nil {
		dial := upstream.Dial(p.dial)
		next = &clients{main: upstream.NewClient(c, dial), lock: upstream.NewClient(c, dial)}
	}
	if old := p.clients.Swap(next); old != nil {
		old.main.Close()
		old.lock.Close()
	}
}
