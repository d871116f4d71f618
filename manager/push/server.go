// Package push sends the policies of pods to the agents of their nodes.
//
// The desired state is one map from pod to policy, which Server.Set replaces as a whole. A
// stream keeps only the uids of pods whose policy must still be sent, and looks up the
// policy when it sends it. So the latest policy wins, a slow agent delays no other, and a
// stream's memory is bounded by the number of pods of its node.
//
// The answers of agents are kept in memory with their stream, and read with Server.Observe.
package push

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

const (
	// An agent opens one stream; while it is being replaced there are two, and
	// a broken connection may linger.
	maxStreamsPerNode = 4
	maxReviews        = 16
	// An agent has at most three calls in progress, and its replacement as many. A peer
	// that makes more delays only itself.
	maxCallsPerPeer = 6
	helloTimeout    = 10 * time.Second
	// An agent requests the certificate of a host once a day. The rate bounds agents whose
	// pods connect to ever new hosts.
	egressRate, egressBurst = 2, 200
)

// Signer signs agents' certificate requests.
type Signer interface {
	Sign(csr []byte) (chain [][]byte, err error)
}

// EgressSigner signs agents' certificate requests for other hosts.
type EgressSigner interface {
	SignFor(csr []byte, host string) (chain [][]byte, err error)
}

// Server is the Mesh service. With Auth, Signer, Changed and Counted set it is ready
// to serve; streams wait until the first Set.
type Server struct {
	meshv1.UnimplementedMeshServer

	Auth   *Authenticator
	Signer Signer
	// EgressSigner may be nil: no certificates for other hosts then.
	EgressSigner EgressSigner
	// Changed is called, without delay and from any goroutine, when the results of Observe
	// or the number of connected agents have changed.
	Changed func()
	// Counted is called instead of Changed when only the states and counts of rules have
	// changed.
	Counted func()
	// StreamLife is the maximum age of a stream, after which the agent must authenticate
	// again; zero means one hour.
	StreamLife time.Duration
	Log        *slog.Logger

	reviews reviewLimiter

	mu      sync.Mutex
	cluster *meshv1.Cluster
	// known is closed by the first Set; nil before someone waits for it.
	known chan struct{}
	nodes nodes
	// exits are the nodes of pods of which an agent has reported dead holders, by uid: all of those of
	// which one still does.
	exits map[string]string
	// webhooksKnown: SetWebhooks was called. Until then agents keep what they have.
	webhooksKnown bool
}

// nodes are the nodes with pods or an agent, by name.
type nodes map[string]*node

// node is what is known of one node.
type node struct {
	policies map[string]*meshv1.PodPolicy // by pod uid
	streams  []*stream                    // oldest first
	// last is the stream that ended last, while there is no other.
	last *stream
	left time.Time
	// lost are the streams that ended within meshv1.LostWrite.
	lost     []*stream
	webhooks *meshv1.Webhooks // nil: none
	// removed are pods without a policy that may act, by uid.
	removed map[string]*removed
	// egress bounds the certificates for other hosts; nil before the first.
	egress *rate.Limiter
}

// Set replaces the cluster and the policies of all pods.
func (s *Server) Set(cluster *meshv1.Cluster, policies map[types.UID]compile.Policy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.cluster == nil
	newCluster := first || s.cluster.Version != cluster.Version
	s.cluster = cluster
	if first && s.known != nil {
		close(s.known)
	}

	byNode := byNode(policies)
	for name := range byNode {
		s.nodes.node(name)
	}
	for name, n := range s.nodes {
		old, wanted := n.policies, byNode[name]
		n.policies = wanted
		for _, st := range n.streams {
			st.clusterDirty = st.clusterDirty || newCluster
			st.mark(old, wanted, first)
		}
		for uid, p := range old {
			if wanted[uid] == nil {
				n.remove(uid, p.Namespace)
			}
		}
		n.forgetRemoved()
		for _, st := range n.streams {
			if first {
				n.removeUnknown(st)
			}
			if first || st.clusterDirty || len(st.dirty) > 0 { // to wake thousands of others takes time
				st.ready.Set()
			}
		}
		s.nodes.forget(name)
	}
}

// firstSet returns a channel that is closed by the first Set.
func (s *Server) firstSet() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known == nil {
		s.known = make(chan struct{})
		if s.cluster != nil {
			close(s.known)
		}
	}
	return s.known
}

// SetWebhooks replaces the webhooks of all nodes, by node. A node that had some and has none
// any more is sent an empty message.
func (s *Server) SetWebhooks(byNode map[string]*meshv1.Webhooks) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range byNode {
		s.nodes.node(name)
	}
	s.webhooksKnown = true
	for name, n := range s.nodes {
		n.webhooks = byNode[name]
		for _, st := range n.streams {
			st.ready.Set()
		}
		s.nodes.forget(name)
	}
}

// byNode are the policies of scheduled pods, by node and uid.
func byNode(policies map[types.UID]compile.Policy) map[string]map[string]*meshv1.PodPolicy {
	out := map[string]map[string]*meshv1.PodPolicy{}
	for uid, p := range policies {
		if p.Node == "" {
			continue
		}
		if out[p.Node] == nil {
			out[p.Node] = map[string]*meshv1.PodPolicy{}
		}
		out[p.Node][string(uid)] = p.PodPolicy
	}
	return out
}

// mark marks the pods whose policies must be sent: those that differ, or all.
func (st *stream) mark(old, wanted map[string]*meshv1.PodPolicy, all bool) {
	for uid, p := range wanted {
		if all || old[uid].GetVersion() != p.Version {
			st.dirty[uid] = struct{}{}
		}
	}
	for uid := range old {
		if wanted[uid] == nil {
			st.dirty[uid] = struct{}{}
			delete(st.seen, uid)
		}
	}
}

// node returns a node, which it adds if it is not there.
func (all *nodes) node(name string) *node {
	if *all == nil {
		*all = nodes{}
	}
	n := (*all)[name]
	if n == nil {
		n = &node{}
		(*all)[name] = n
	}
	return n
}

// forget removes a node that has neither pods nor an agent.
func (all nodes) forget(name string) {
	if n := all[name]; len(n.policies) == 0 && len(n.streams) == 0 && len(n.removed) == 0 && n.webhooks == nil {
		delete(all, name)
	}
}

// abilities returns the abilities of the nodes with a connected agent, by node.
func (all nodes) abilities() map[string]abilities {
	out := map[string]abilities{}
	for name, n := range all {
		if len(n.streams) > 0 {
			out[name] = n.streams[len(n.streams)-1].can
		}
	}
	return out
}

// SignLeaf implements meshv1.MeshServer.
func (s *Server) SignLeaf(ctx context.Context, req *meshv1.SignLeafRequest) (*meshv1.SignLeafResponse, error) {
	node, err := s.authenticate(ctx)
	if err != nil {
		return nil, err
	}
	chain, err := s.Signer.Sign(req.Csr)
	if err != nil {
		s.log().Warn("a certificate request was not signed", "node", node, "error", err)
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	s.log().Info("signed an agent's certificate", "node", node)
	return &meshv1.SignLeafResponse{Chain: chain}, nil
}

// SignEgressLeaf implements meshv1.MeshServer.
func (s *Server) SignEgressLeaf(ctx context.Context, req *meshv1.SignEgressLeafRequest) (*meshv1.SignLeafResponse, error) {
	node, err := s.authenticate(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.maySignEgress(node); err != nil {
		return nil, err
	}
	chain, err := s.EgressSigner.SignFor(req.Csr, req.Host)
	if err != nil {
		s.log().Warn("a certificate for another host was not signed", "node", node, "host", clip(req.Host), "error", err)
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	s.log().Info("signed a certificate for another host", "node", node, "host", clip(req.Host))
	return &meshv1.SignLeafResponse{Chain: chain}, nil
}

// maySignEgress returns an error for nodes on which no pod has opted in, and for nodes that
// exceed the rate.
func (s *Server) maySignEgress(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes[name]
	decrypts := func(_ string, p *meshv1.PodPolicy) bool { return p.GetTraffic().GetEgress().GetDecrypt() }
	if n == nil || s.EgressSigner == nil || !collect.Any(n.policies, decrypts) {
		return status.Error(codes.PermissionDenied, "no pod of the node trusts the egress CA and has rules for other hosts")
	}
	if n.egress == nil {
		n.egress = rate.NewLimiter(egressRate, egressBurst)
	}
	if !n.egress.Allow() {
		return status.Error(codes.ResourceExhausted, "the node asks for too many certificates")
	}
	return nil
}

// Connect implements meshv1.MeshServer.
func (s *Server) Connect(conn meshv1.Mesh_ConnectServer) error {
	name, err := s.authenticate(conn.Context())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(conn.Context())
	defer cancel(nil)
	expiry := time.AfterFunc(cmp.Or(s.StreamLife, time.Hour), func() {
		cancel(status.Error(codes.Unavailable, "the stream reached its maximum age: connect again with a fresh token"))
	})
	defer expiry.Stop()

	first := make(chan error, 1)
	var hello *meshv1.Hello
	go func() {
		msg, err := conn.Recv()
		hello = msg.GetHello()
		first <- err
	}()
	select {
	case err := <-first:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(helloTimeout):
		return status.Error(codes.DeadlineExceeded, "no hello came")
	}
	switch {
	case hello == nil:
		return status.Error(codes.InvalidArgument, "the first message must be a hello")
	case hello.Node != name:
		return status.Errorf(codes.PermissionDenied, "the token is bound to node %s, not to the one that says hello", name)
	}

	st := s.join(name, conn, hello, cancel)
	defer s.leave(name, st)
	done := make(chan error, 2)
	go func() { done <- s.receive(ctx, name, st) }()
	go func() { done <- s.send(ctx, name, st) }()
	// Returning ends the connection's stream, which ends both goroutines.
	select {
	case err = <-done:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return err
}

// CloseStreams ends all streams, so that agents connect to another leader.
func (s *Server) CloseStreams() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.nodes {
		for _, st := range n.streams {
			st.cancel(status.Error(codes.Unavailable, "the manager is stopping"))
		}
	}
}

func (s *Server) authenticate(ctx context.Context) (string, error) {
	token, err := bearer(ctx)
	if err != nil {
		return "", err
	}
	leave, err := s.reviews.enter(ctx)
	if err != nil {
		return "", err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	node, err := s.Auth.Node(ctx, token)
	switch {
	case errors.Is(err, errRefused):
		s.log().Warn("an agent was refused", "error", err)
		return "", status.Error(codes.Unauthenticated, "the token is not that of an agent of this mesh")
	case err != nil:
		return "", status.Error(codes.Unavailable, err.Error())
	}
	trustPeer(ctx)
	return node, nil
}

// join adds a stream to its node and marks the policies of all its pods to be sent.
func (s *Server) join(name string, conn meshv1.Mesh_ConnectServer, h *meshv1.Hello, cancel context.CancelCauseFunc) *stream {
	st := &stream{
		conn:         conn,
		can:          can(h),
		cancel:       cancel,
		clusterDirty: true,
		dirty:        map[string]struct{}{},
		seen:         map[string]Observation{},
		versions:     h.Versions,
		namespaces:   h.Namespaces,
	}
	s.mu.Lock()
	n := s.nodes.node(name)
	for uid := range n.policies {
		st.dirty[uid] = struct{}{}
		if v := h.Versions[uid]; v != "" {
			st.seen[uid] = Observation{Version: clip(v)}
		}
	}
	if len(n.streams) == 0 {
		metrics.AgentsConnected.Inc()
	}
	n.streams = append(n.streams, st)
	if s.cluster != nil {
		n.removeUnknown(st)
	}
	if len(n.streams) > maxStreamsPerNode {
		n.streams[0].cancel(status.Error(codes.ResourceExhausted, "the node has too many streams: this one is the oldest"))
	}
	n.last = nil
	s.mu.Unlock()
	s.log().Info("an agent connected", "node", name, "version", clip(h.AgentVersion))
	s.Changed()
	return st
}

func (s *Server) leave(name string, st *stream) {
	s.mu.Lock()
	n := s.nodes.node(name)
	n.streams = slices.DeleteFunc(n.streams, func(o *stream) bool { return o == st })
	if len(n.streams) == 0 {
		n.last, n.left = st, time.Now()
		metrics.AgentsConnected.Dec()
	}
	n.unconfirmed(st)
	n.lost = append(n.lost, st)
	if len(n.lost) > maxStreamsPerNode {
		n.lost = n.lost[1:]
	}
	s.nodes.forget(name)
	s.mu.Unlock()
	// The agent may have died with writes in flight. After LostWrite none can take effect.
	time.AfterFunc(meshv1.LostWrite, func() {
		s.mu.Lock()
		n.lost = slices.DeleteFunc(n.lost, func(o *stream) bool { return o == st })
		s.mu.Unlock()
		s.Changed()
	})
	s.log().Info("an agent disconnected", "node", name)
	s.Changed()
}

func (s *Server) log() *slog.Logger { return cmp.Or(s.Log, slog.Default()) }

// readBuffer is what a connection keeps to read into. With gRPC's 32 KiB, those of 5,000 nodes
// would take 160 MB.
const readBuffer = 4 << 10

// maxMessage bounds a message from an agent: a report on every pod that a node
// can hold, many times over.
const maxMessage = 4 << 20

// Serve serves agents on a listener until the context ends.
func (s *Server) Serve(ctx context.Context, l net.Listener, config *tls.Config) error {
	config = config.Clone()
	config.MinVersion = tls.VersionTLS13
	config.NextProtos = []string{"h2"}
	server := grpc.NewServer(
		grpc.Creds(guardedTLS{credentials.NewTLS(config)}),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.ReadBufferSize(readBuffer),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.MaxConcurrentStreams(8),
		grpc.ConnectionTimeout(helloTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: maxIdle, Time: 20 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)
	meshv1.RegisterMeshServer(server, s)
	stop := context.AfterFunc(ctx, func() {
		s.CloseStreams()
		server.Stop()
	})
	defer stop()
	err := server.Serve(guard(l))
	if ctx.Err() != nil {
		return nil
	}
	return err
}
