package proxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// Config configures a Server.
type Config struct {
	// Leaf returns the current serving certificate. It is called for every
	// handshake; an error fails the handshake. Required.
	Leaf func() (*tls.Certificate, error)
	// Logger gets errors, and one line per request at debug level. Nil: none.
	Logger *slog.Logger
	// Registerer registers the metrics. Nil: they are not registered.
	Registerer prometheus.Registerer
	// Node is the node's name, for logs.
	Node string
	// Notify, if not nil, reports to the users of a pod: one of the Reasons of package
	// stages and a message. It is called on its own goroutine, at most once a minute for each
	// pod and reason.
	Notify func(pod PodInfo, reason, message string)
	// EgressLeaf returns a function that issues certificates for hosts, for one pod, by the
	// egress CA. Nil, or an error: connections to the host are not decrypted.
	EgressLeaf func() func(ctx context.Context, host string) (*tls.Certificate, error)
	// WatchMemory bounds the memory of one pod's watches and other requests that may last,
	// in bytes, if no other pod uses as much. Zero: pipeline.DefaultWatchMemory.
	WatchMemory int64
	// EgressRoots verify the servers of decrypted connections. Nil: the system's roots.
	EgressRoots *x509.CertPool
}

// Server is the data plane of one node. Its methods are safe for concurrent use.
type Server struct {
	config  Config
	log     *slog.Logger // Config.Logger with the node, never nil
	metrics *metrics.Node

	// What the pods share, within their bounds.
	conns                *downstream.Pools
	held, long, filtered *bounds.Pool
	// And what the clients of their webhooks share.
	reviewConns *downstream.Pools
	reviewed    *bounds.Pool // bytes

	mu      sync.Mutex
	cluster *upstream.Cluster
	pods    map[*Pod]struct{}
}

// New returns a server without pods. It fails if the name of a metric is taken.
func New(c Config) (*Server, error) {
	if c.Leaf == nil {
		return nil, errors.New("proxy: Config.Leaf is required")
	}
	c.WatchMemory = cmp.Or(c.WatchMemory, pipeline.DefaultWatchMemory)
	log := c.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if c.Node != "" {
		log = log.With("node", c.Node)
	}
	m, err := metrics.NewNode(c.Registerer)
	if err != nil {
		return nil, err
	}
	s := &Server{
		config: c, log: log, metrics: m, pods: map[*Pod]struct{}{},
		conns: downstream.NewPools(), held: bounds.NewPool(pipeline.MaxHeld, pipeline.OwnHeld),
		long: bounds.NewPool(c.WatchMemory, pipeline.OwnLong), filtered: bounds.NewPool(pipeline.MaxFiltered, pipeline.OwnFiltered),
		reviewConns: downstream.NewPools(), reviewed: bounds.NewPool(maxReviews, ownReviews),
	}
	if c.Registerer != nil {
		if err := c.Registerer.Register(metrics.Breakers(s.openBreakers)); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// SetCluster sets the addresses of the apiserver, which must be literal, and the CA that
// verifies it under the name kubernetes.default.svc. On an error the last valid cluster
// stays. Requests in progress keep their connections.
func (s *Server) SetCluster(m *meshv1.Cluster) error {
	cluster, err := upstream.NewCluster(m)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if cluster.Equal(s.cluster) {
		return nil
	}
	s.cluster = cluster
	for p := range s.pods {
		p.setCluster(cluster)
	}
	return nil
}

// Pod adds a pod. dial connects from its network namespace. Until Apply the
// pod's requests are answered 503; Shutdown removes the pod.
func (s *Server) Pod(info PodInfo, dial DialFunc) *Pod {
	p := newPod(s, info, dial)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods[p] = struct{}{}
	if s.cluster != nil {
		p.setCluster(s.cluster)
	}
	return p
}

func (s *Server) remove(p *Pod) {
	p.stopCounting()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, p)
	p.setCluster(nil)
}

// openBreakers returns how many pods have an open breaker, by rule.
func (s *Server) openBreakers() map[metrics.Rule]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	open := map[metrics.Rule]int{}
	for p := range s.pods {
		if pol := p.env.Policy.Load(); pol != nil {
			for _, n := range pol.Traffic.Rules.Opened() {
				open[pol.Series(n.Breaker, n.Rule)]++
			}
		}
	}
	return open
}
