package policy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Handler is told what the manager says. Its methods are called one at a time,
// in order; an error is the agent's "no" and travels back to the manager.
type Handler interface {
	SetCluster(*meshv1.Cluster) error
	// SetPolicy puts a policy in force. What earlier ones let through is over when
	// settled is closed; nil: it is. Only then the manager is told.
	SetPolicy(*meshv1.PodPolicy) (settled <-chan struct{}, err error)
	// RemovePolicy leaves a pod without a policy, so that it is refused if it runs. settled
	// is as of SetPolicy.
	RemovePolicy(uid string) (settled <-chan struct{}, err error)
	// TrafficProblem tells why the rules of the policy that was set last are not in force
	// though the rest of it is, and what holds instead; "": they are.
	TrafficProblem(uid string) string
	// Serial is the highest of a policy that the pod has had; barred: it was refused since,
	// and no policy with that serial is applied any more.
	Serial(uid string) (serial uint64, barred bool)
	// Synced is told the uids of all pods that the manager has a policy for.
	Synced(uids map[string]bool)
	// Versions are those of the policies that settled, by the uids of all pods that run or
	// whose writes go on; empty for a pod without such a policy.
	Versions() map[string]string
	// Namespaces are those of the pods, by uid, as far as they are known.
	Namespaces() map[string]string
}

// Manager is the agent's line to the manager.
type Manager struct {
	// Address is host:port of the manager's Service.
	Address string
	// ServerName is verified in the manager's certificate.
	ServerName string
	// Roots returns the CA certificates that the manager's is signed by.
	Roots func(context.Context) (*x509.CertPool, error)
	// TokenFile holds this agent's token, read anew for each call.
	TokenFile string
	// Node is this node's name.
	Node string
	// Version is this program's version.
	Version string
	// Captures are the ways of capture that work on this node.
	Captures []string
	// HostNetwork is why pods under hostNetwork cannot be captured here; nil where
	// they can.
	HostNetwork error
	Logger      *slog.Logger

	mu      sync.Mutex
	pending map[string]*meshv1.PodReport // latest report of each pod, to be sent
	all     map[string]*meshv1.PodReport // latest report of each pod
	wake    chan struct{}
	conn    *grpc.ClientConn // that of the stream; nil without one

	inStep atomic.Bool
}

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 2 * time.Second
	// connectTimeout bounds one attempt to connect, 20 s by default. One that was
	// made while the Service still pointed at a leader that is gone gets no answer,
	// even after it points at the next.
	connectTimeout = 3 * time.Second
	// maxReport bounds a report in bytes: the manager takes four times as much.
	maxReport = 1 << 20
)

// Report notes the state of a pod, to be told to the manager now if it is
// connected and else when it is.
func (m *Manager) Report(r *meshv1.PodReport) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.init()
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

// Forget drops what is noted of a pod that is gone.
func (m *Manager) Forget(uid string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.init()
	delete(m.pending, uid)
	delete(m.all, uid)
}

func (m *Manager) init() {
	if m.wake == nil {
		m.wake = make(chan struct{}, 1)
		m.pending = map[string]*meshv1.PodReport{}
		m.all = map[string]*meshv1.PodReport{}
	}
}

// Run keeps a stream to the manager until ctx ends.
func (m *Manager) Run(ctx context.Context, h Handler) {
	m.mu.Lock()
	m.init()
	m.mu.Unlock()
	wait := minBackoff
	for ctx.Err() == nil {
		start := time.Now()
		err := m.connect(ctx, h)
		if ctx.Err() != nil {
			return
		}
		m.Logger.Info("no stream to the manager; serving as last told", "error", err, "retry_in", wait)
		if time.Since(start) > 10*time.Second {
			wait = minBackoff
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, maxBackoff)
	}
}

// InStep tells whether the agent hears a manager that has told it all.
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
	if err != nil {
		return nil, fmt.Errorf("asking the manager for a serving certificate: %w", err)
	}
	return resp.GetChain(), nil
}

// SignEgressLeaf is SignLeaf for another host, on the connection of the stream:
// without one, the manager is not waited for.
func (m *Manager) SignEgressLeaf(ctx context.Context, csr []byte, host string) ([][]byte, error) {
	m.mu.Lock()
	conn := m.conn
	m.mu.Unlock()
	if conn == nil {
		return nil, errors.New("asking the manager for a certificate: there is no connection to it")
	}
	resp, err := meshv1.NewMeshClient(conn).SignEgressLeaf(ctx, &meshv1.SignEgressLeafRequest{Csr: csr, Host: host})
	if err != nil {
		return nil, fmt.Errorf("asking the manager for a certificate: %w", err)
	}
	return resp.GetChain(), nil
}

func (m *Manager) use(conn *grpc.ClientConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.conn = conn
}

func (m *Manager) dial(ctx context.Context) (*grpc.ClientConn, error) {
	roots, err := m.Roots(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the manager's CA: %w", err)
	}
	conn, err := grpc.NewClient("passthrough:///"+m.Address,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			RootCAs: roots, ServerName: m.ServerName, MinVersion: tls.VersionTLS13,
		})),
		grpc.WithPerRPCCredentials(tokenFile(m.TokenFile)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: connectTimeout}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(meshv1.MaxMessageBytes)))
	if err != nil {
		return nil, fmt.Errorf("connecting to the manager: %w", err)
	}
	return conn, nil
}

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
		Captures: m.Captures, HostNetwork: m.HostNetwork == nil, Abilities: []string{meshv1.AbilityTraffic, meshv1.AbilityLargePolicies, meshv1.AbilityStandby},
	}
	if m.HostNetwork != nil {
		hello.HostNetworkReason = m.HostNetwork.Error()
	}
	if err := stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Hello{Hello: hello}}); err != nil {
		return fmt.Errorf("greeting the manager: %w", err)
	}

	m.use(conn)
	defer m.use(nil)
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
	err = m.receive(ctx, stream, h, acks)
	cancel()
	<-done
	return err
}

// send is the only writer of the stream.
func (m *Manager) send(ctx context.Context, stream meshv1.Mesh_ConnectClient, acks <-chan *meshv1.Ack) {
	for {
		report := m.takeReport()
		if report != nil {
			if stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Report{Report: report}}) != nil {
				return
			}
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
		if of > maxReport { // what its rules have done is not worth the stream
			p = proto.CloneOf(p)
			p.Rules, p.Faults = nil, nil
			of = proto.Size(p)
		}
		if size += of; size > maxReport && len(r.Pods) > 0 {
			m.poke() // for the rest
			break
		}
		r.Pods = append(r.Pods, p)
		delete(m.pending, uid)
	}
	return r
}

func (m *Manager) receive(ctx context.Context, stream meshv1.Mesh_ConnectClient, h Handler, acks *acks) error {
	world := map[string]bool{} // pods told of before Synced; nil after it
	ack := func(uid, version string, settled <-chan struct{}, err error) {
		a := &meshv1.Ack{Uid: uid, Version: version}
		if err != nil {
			a.Error = err.Error()
			m.Logger.Error("policy not applied; the last good one stays", "uid", uid, "version", version, "error", err)
		} else if uid != "" {
			a.TrafficError = h.TrafficProblem(uid)
		}
		if uid != "" {
			a.Serial, a.Barred = h.Serial(uid)
		}
		acks.add(ctx, a, settled)
	}
	for {
		msg, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("listening to the manager: %w", err)
		}
		switch k := msg.GetKind().(type) {
		case *meshv1.ManagerMessage_Cluster:
			ack("", k.Cluster.GetVersion(), nil, h.SetCluster(k.Cluster))
		case *meshv1.ManagerMessage_Upsert:
			if world != nil {
				world[k.Upsert.GetUid()] = true
			}
			settled, err := h.SetPolicy(k.Upsert)
			ack(k.Upsert.GetUid(), k.Upsert.GetVersion(), settled, err)
		case *meshv1.ManagerMessage_Remove:
			settled, err := h.RemovePolicy(k.Remove.GetUid())
			ack(k.Remove.GetUid(), "", settled, err)
		case *meshv1.ManagerMessage_Synced:
			if world == nil {
				return errors.New("the manager said Synced twice")
			}
			m.Logger.Info("in step with the manager", "pods", len(world))
			h.Synced(world)
			world = nil
			m.inStep.Store(true)
		}
	}
}

// tokenFile authenticates calls with a token that is read anew each time, since
// the kubelet renews it.
type tokenFile string

func (f tokenFile) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	b, err := os.ReadFile(string(f))
	if err != nil {
		return nil, fmt.Errorf("reading this agent's token: %w", err)
	}
	return map[string]string{"authorization": "Bearer " + strings.TrimSpace(string(b))}, nil
}

func (tokenFile) RequireTransportSecurity() bool { return true }
