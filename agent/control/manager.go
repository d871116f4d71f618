package control

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/wait"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Handler applies what the manager sends. Its methods are called one at a time, in order.
// An error goes to the manager as a rejection.
type Handler interface {
	SetCluster(*meshv1.Cluster) error
	// SetPolicy applies a policy. After an error, too, it returns what applies.
	SetPolicy(*meshv1.PodPolicy) (Applied, error)
	// RemovePolicy removes the policy of a pod, whose requests are refused while it runs.
	RemovePolicy(uid string) (Applied, error)
	// SetWebhooks replaces how reviews are routed.
	SetWebhooks(*meshv1.Webhooks)
	// Synced receives the uids of all pods that the manager has a policy for.
	Synced(uids map[string]bool)
	// Versions returns the versions of the policies that settled, by the uids of all pods
	// that run or have writes in flight; "" for a pod without such a policy.
	Versions() map[string]string
	// Namespaces returns the namespaces of the pods by uid, as far as they are known.
	Namespaces() map[string]string
}

// Applied is what applies to a pod after a message. It is one value, so that an ack does not
// mix this state with a later one.
type Applied struct {
	// Settled is closed, or nil, when no write that earlier policies allowed can take effect
	// any more, and the next agent would know the policy. The ack is sent only then.
	Settled <-chan struct{}
	// TrafficProblem is why the traffic rules of the last policy are not applied though the
	// rest of it is, and which rules apply instead; "" if they are applied.
	TrafficProblem string
	// Serial is the highest serial of a policy that the pod has had. Barred means that the
	// pod was refused since, and that no policy with that serial is applied any more.
	Serial uint64
	Barred bool
}

// Config configures a Manager.
type Config struct {
	// Address is host:port of the manager's Service.
	Address string
	// Dial connects to Address; nil: by TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	// ServerName is verified in the manager's certificate.
	ServerName string
	// Roots returns the CA certificates that the manager's is signed by.
	Roots func(context.Context) (*x509.CertPool, error)
	// TokenFile holds this agent's token, read for each call.
	TokenFile string
	// Node is this node's name.
	Node string
	// Version is this program's version.
	Version string
	// Captures are the capture modes that work on this node.
	Captures []string
	// HostNetwork is why pods under hostNetwork cannot be captured here; nil if they can.
	HostNetwork error
	Logger      *slog.Logger
}

// Manager is the agent's connection to the manager.
type Manager struct {
	Config

	mu      sync.Mutex
	pending map[string]*meshv1.PodReport // latest report of each pod, to be sent
	all     map[string]*meshv1.PodReport // latest report of each pod
	wake    chan struct{}

	conn   atomic.Pointer[grpc.ClientConn] // that of the stream; nil without one
	inStep atomic.Bool
}

// New returns a connection that Run opens.
func New(c Config) *Manager {
	if c.Dial == nil {
		c.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		}
	}
	return &Manager{Config: c, wake: make(chan struct{}, 1), pending: map[string]*meshv1.PodReport{}, all: map[string]*meshv1.PodReport{}}
}

// connectBackoff paces reconnects. The jitter keeps the agents of all nodes from
// connecting to a new leader at once.
var connectBackoff = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.5, Cap: 2 * time.Second, Steps: math.MaxInt}

const (
	// stableAfter is how long a stream lasts before the backoff starts over.
	stableAfter = 10 * time.Second
	// dialTimeout bounds one attempt to open a connection. An attempt that began while the Service
	// pointed at a former leader gets no answer, even after the Service points at the next.
	dialTimeout = 3 * time.Second
	// connectTimeout bounds dial and handshake. It is longer, because a new leader serves the agents of
	// all nodes one after another: it would work for nothing if they gave up while they waited.
	connectTimeout = 10 * time.Second
	// maxReport bounds a report in bytes: the manager takes four times as much.
	maxReport = 1 << 20
)

// Report queues the state of a pod. It is sent as soon as the manager is connected.
func (m *Manager) Report(r *meshv1.PodReport) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pending[r.GetUid()] = r
	m.all[r.GetUid()] = r
	m.poke()
}

// poke wakes send.
func (m *Manager) poke() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Forget drops the reports of a pod that was deleted.
func (m *Manager) Forget(uid string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.pending, uid)
	delete(m.all, uid)
}

// Run keeps a stream to the manager until ctx ends.
func (m *Manager) Run(ctx context.Context, h Handler) {
	for backoff := connectBackoff; ctx.Err() == nil; {
		start := time.Now()
		err := m.connect(ctx, h)
		if ctx.Err() != nil {
			return
		}
		if time.Since(start) > stableAfter {
			backoff = connectBackoff
		}
		retry := backoff.Step()
		m.Logger.Info("no stream to the manager; the last policies apply", "error", err, "retry_in", retry)
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
}

// InStep reports whether the agent is connected to a manager and has all its policies.
func (m *Manager) InStep() bool { return m.inStep.Load() }

// SignLeaf asks the manager to sign a certificate for the public key of csr
// (DER of PKCS #10). It returns the DER chain, leaf first.
func (m *Manager) SignLeaf(ctx context.Context, csr []byte) ([][]byte, error) {
	conn, err := m.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	resp, err := meshv1.NewMeshClient(conn).SignLeaf(ctx, &meshv1.SignLeafRequest{Csr: csr})
	return resp.GetChain(), failure.Wrap(err, "asking the manager for a serving certificate")
}

// SignEgressLeaf is SignLeaf for another host, on the connection of the stream. Without a
// stream it fails at once.
func (m *Manager) SignEgressLeaf(ctx context.Context, csr []byte, host string) ([][]byte, error) {
	conn := m.conn.Load()
	if conn == nil {
		return nil, errors.New("asking the manager for a certificate: there is no connection to it")
	}
	resp, err := meshv1.NewMeshClient(conn).SignEgressLeaf(ctx, &meshv1.SignEgressLeafRequest{Csr: csr, Host: host})
	return resp.GetChain(), failure.Wrap(err, "asking the manager for a certificate")
}

func (m *Manager) dial(ctx context.Context) (*grpc.ClientConn, error) {
	roots, err := m.Roots(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the manager's CA: %w", err)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			RootCAs: roots, ServerName: m.ServerName, MinVersion: tls.VersionTLS13,
		})),
		grpc.WithPerRPCCredentials(tokenFile(m.TokenFile)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: connectTimeout}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(meshv1.MaxMessageBytes)),
		grpc.WithContextDialer(m.open),
	}
	conn, err := grpc.NewClient("passthrough:///"+m.Address, options...)
	return conn, failure.Wrap(err, "connecting to the manager")
}

// open opens a connection.
func (m *Manager) open(ctx context.Context, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return m.Dial(ctx, address)
}

// abilities of this agent.
var abilities = []string{meshv1.AbilityTraffic, meshv1.AbilityLargePolicies, meshv1.AbilityStandby, meshv1.AbilityClusterScoped, meshv1.AbilityUserAgents, meshv1.AbilityRequestScope, meshv1.AbilityClusters, meshv1.AbilityMemberNamespaces, meshv1.AbilityShadow}

func (m *Manager) connect(ctx context.Context, h Handler) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := m.dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := meshv1.NewMeshClient(conn).Connect(ctx)
	if err != nil {
		return fmt.Errorf("opening the stream: %w", err)
	}
	hello := &meshv1.Hello{
		Node: m.Node, AgentVersion: m.Version, Versions: h.Versions(), Namespaces: h.Namespaces(),
		Captures: m.Captures, HostNetwork: m.HostNetwork == nil, Abilities: abilities,
	}
	if m.HostNetwork != nil {
		hello.HostNetworkReason = m.HostNetwork.Error()
	}
	if err := stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Hello{Hello: hello}}); err != nil {
		return fmt.Errorf("greeting the manager: %w", err)
	}

	m.conn.Store(conn)
	defer m.conn.Store(nil)
	defer m.inStep.Store(false)
	m.mu.Lock()
	maps.Copy(m.pending, m.all) // a new manager knows nothing yet
	m.mu.Unlock()

	acks := newAcks()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer cancel()
		m.send(ctx, stream, acks.out)
	}()
	err = (&session{Manager: m, handler: h, acks: acks, known: map[string]bool{}}).receive(ctx, stream)
	cancel()
	<-done
	return err
}

// send is the only writer of the stream.
func (m *Manager) send(ctx context.Context, stream meshv1.Mesh_ConnectClient, acks <-chan *meshv1.Ack) {
	for {
		report := m.takeReport()
		if report != nil && stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Report{Report: report}}) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		case a := <-acks:
			if stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Ack{Ack: a}}) != nil {
				return
			}
		}
	}
}

// takeReport takes as many of the pending reports as go into one message.
func (m *Manager) takeReport() *meshv1.Report {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.pending) == 0 {
		return nil
	}
	r := &meshv1.Report{}
	size := 0
	for uid, p := range m.pending {
		of := proto.Size(p)
		if of > maxReport { // without the counts it is small
			p = proto.CloneOf(p)
			p.Rules, p.Faults = nil, nil
			of = proto.Size(p)
		}
		if size += of; size > maxReport && len(r.Pods) > 0 {
			m.poke() // to send the rest
			break
		}
		r.Pods = append(r.Pods, p)
		delete(m.pending, uid)
	}
	return r
}

// session is what is received on one stream.
type session struct {
	*Manager
	handler Handler
	acks    *acks
	synced  bool
	known   map[string]bool // uids of the pods that were received before Synced
}

// receive applies messages until the stream ends.
func (s *session) receive(ctx context.Context, stream meshv1.Mesh_ConnectClient) error {
	for {
		msg, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("receiving from the manager: %w", err)
		}
		if err := s.apply(ctx, msg); err != nil {
			return err
		}
	}
}

func (s *session) apply(ctx context.Context, msg *meshv1.ManagerMessage) error {
	switch k := msg.GetKind().(type) {
	case *meshv1.ManagerMessage_Cluster:
		s.ack(ctx, "", k.Cluster.GetVersion(), Applied{}, s.handler.SetCluster(k.Cluster))
	case *meshv1.ManagerMessage_Upsert:
		uid := k.Upsert.GetUid()
		if !s.synced {
			s.known[uid] = true
		}
		applied, err := s.handler.SetPolicy(k.Upsert)
		s.ack(ctx, uid, k.Upsert.GetVersion(), applied, err)
	case *meshv1.ManagerMessage_Remove:
		applied, err := s.handler.RemovePolicy(k.Remove.GetUid())
		s.ack(ctx, k.Remove.GetUid(), "", applied, err)
	case *meshv1.ManagerMessage_Webhooks:
		s.handler.SetWebhooks(k.Webhooks)
	case *meshv1.ManagerMessage_Synced:
		if s.synced {
			return errors.New("the manager sent Synced twice")
		}
		s.Logger.Info("received all policies from the manager", "pods", len(s.known))
		s.handler.Synced(s.known)
		s.synced, s.known = true, nil
		s.inStep.Store(true)
	}
	return nil
}

// ack answers once what is applied has settled. An empty uid is that of the cluster.
func (s *session) ack(ctx context.Context, uid, version string, applied Applied, err error) {
	a := &meshv1.Ack{Uid: uid, Version: version, Serial: applied.Serial, Barred: applied.Barred}
	if err != nil {
		a.Error = err.Error()
		s.Logger.Error("a policy was rejected, or could not be saved", "uid", uid, "version", version, "error", err)
	} else {
		a.TrafficError = applied.TrafficProblem
	}
	s.acks.add(ctx, a, applied.Settled)
}

// tokenFile authenticates calls with a token that is read for each call, because the
// kubelet renews it.
type tokenFile string

func (f tokenFile) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	b, err := os.ReadFile(string(f))
	if err != nil {
		return nil, fmt.Errorf("reading this agent's token: %w", err)
	}
	return map[string]string{"authorization": "Bearer " + strings.TrimSpace(string(b))}, nil
}

func (tokenFile) RequireTransportSecurity() bool { return true }
