package control

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

const timeout = 30 * time.Second

// manager is the other end of the stream, over real TLS and gRPC.
type manager struct {
	meshv1.UnimplementedMeshServer
	streams chan *stream
}

type stream struct {
	meshv1.Mesh_ConnectServer
	token string
	got   chan *meshv1.AgentMessage
	end   chan struct{}
}

func (m *manager) Connect(s meshv1.Mesh_ConnectServer) error {
	md, _ := metadata.FromIncomingContext(s.Context())
	st := &stream{Mesh_ConnectServer: s, token: md.Get("authorization")[0], got: make(chan *meshv1.AgentMessage, 100), end: make(chan struct{})}
	go func() {
		for {
			msg, err := s.Recv()
			if err != nil {
				close(st.got)
				return
			}
			st.got <- msg
		}
	}()
	m.streams <- st
	select {
	case <-st.end:
	case <-s.Context().Done():
	}
	return nil
}

// recorder is an agent that notes what it receives.
type recorder struct {
	mu       sync.Mutex
	versions map[string]string
	settled  map[string]chan struct{} // by version
	synced   chan map[string]bool
}

func (r *recorder) SetCluster(*meshv1.Cluster) error { return nil }
func (r *recorder) SetPolicy(p *meshv1.PodPolicy) (Applied, error) {
	applied := Applied{Serial: 7, Barred: true}
	if p.GetVersion() == "bad" {
		return applied, errors.New("no good")
	}
	if p.GetUid() == "rules" {
		applied.TrafficProblem = "no such rules"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.versions[p.GetUid()] = p.GetVersion()
	applied.Settled = r.settled[p.GetVersion()]
	return applied, nil
}
func (r *recorder) RemovePolicy(uid string) (Applied, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.versions, uid)
	return Applied{}, nil
}
func (r *recorder) SetWebhooks(*meshv1.Webhooks) {}

func (r *recorder) Synced(uids map[string]bool)   { r.synced <- uids }
func (r *recorder) Namespaces() map[string]string { return map[string]string{"held": "ns"} }
func (r *recorder) Versions() map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.versions)
}

func start(t *testing.T) (*manager, *Manager, *recorder) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"manager.test"}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(cert)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})))
	m := &manager{streams: make(chan *stream, 10)}
	meshv1.RegisterMeshServer(server, m)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)

	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte("a-token\n"), 0o600))
	client := New(Config{
		Address: l.Addr().String(), ServerName: "manager.test", TokenFile: token, Node: "node1",
		Roots:  func(context.Context) (*x509.CertPool, error) { return roots, nil },
		Logger: slog.New(slog.DiscardHandler),
	})
	agent := &recorder{versions: map[string]string{"held": "7"}, synced: make(chan map[string]bool, 10)}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); client.Run(ctx, agent) }()
	t.Cleanup(func() { cancel(); <-done })
	return m, client, agent
}

func next[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(timeout):
		require.Fail(t, "nothing came")
		panic("unreachable")
	}
}

func upsert(uid, version string) *meshv1.ManagerMessage {
	return &meshv1.ManagerMessage{Kind: &meshv1.ManagerMessage_Upsert{Upsert: &meshv1.PodPolicy{Uid: uid, Version: version}}}
}

func TestStreamReceivesTheLargestPolicy(t *testing.T) {
	m, _, _ := start(t)
	s := next(t, m.streams)
	next(t, s.got) // the greeting
	require.NoError(t, s.Send(&meshv1.ManagerMessage{Kind: &meshv1.ManagerMessage_Upsert{Upsert: &meshv1.PodPolicy{
		Uid: "a", Version: "1", Refuse: strings.Repeat("x", meshv1.MaxPolicyBytes),
	}}}))
	assert.Equal(t, "1", next(t, s.got).GetAck().GetVersion())
}

func TestStreamAppliesAndAcks(t *testing.T) {
	m, _, agent := start(t)
	s := next(t, m.streams)
	assert.Equal(t, "Bearer a-token", s.token)
	hello := next(t, s.got).GetHello()
	assert.Equal(t, "node1", hello.GetNode())
	assert.Equal(t, map[string]string{"held": "7"}, hello.GetVersions())
	assert.Equal(t, []string{"traffic", meshv1.AbilityLargePolicies, meshv1.AbilityStandby, meshv1.AbilityClusterScoped, meshv1.AbilityUserAgents, meshv1.AbilityRequestScope, meshv1.AbilityClusters, meshv1.AbilityMemberNamespaces, meshv1.AbilityShadow}, hello.GetAbilities())

	require.NoError(t, s.Send(upsert("a", "1")))
	require.NoError(t, s.Send(upsert("b", "bad")))
	require.NoError(t, s.Send(&meshv1.ManagerMessage{Kind: &meshv1.ManagerMessage_Synced{Synced: &meshv1.Synced{}}}))

	a, b := next(t, s.got).GetAck(), next(t, s.got).GetAck()
	assert.Equal(t, "1", a.GetVersion())
	assert.Empty(t, a.GetError())
	assert.Equal(t, "no good", b.GetError())
	assert.EqualValues(t, 7, b.GetSerial())
	assert.True(t, b.GetBarred())
	assert.Empty(t, a.GetTrafficError())
	require.NoError(t, s.Send(upsert("rules", "1")))
	rules := next(t, s.got).GetAck()
	assert.Equal(t, []string{"", "no such rules"}, []string{rules.GetError(), rules.GetTrafficError()})
	assert.Equal(t, map[string]bool{"a": true, "b": true}, next(t, agent.synced), "pods that the manager knows")
	assert.Equal(t, map[string]string{"held": "7", "a": "1", "rules": "1"}, agent.Versions())
}

func TestReconnectReportsEverything(t *testing.T) {
	m, client, _ := start(t)
	inStep := func(want bool) {
		t.Helper()
		require.Eventually(t, func() bool { return client.InStep() == want }, timeout, time.Millisecond)
	}
	first := next(t, m.streams)
	next(t, first.got) // hello
	require.False(t, client.InStep(), "nothing was said yet")
	synced := &meshv1.ManagerMessage{Kind: &meshv1.ManagerMessage_Synced{Synced: &meshv1.Synced{}}}
	require.NoError(t, first.Send(synced))
	inStep(true)
	client.Report(&meshv1.PodReport{Uid: "a", Capture: "ebpf"})
	client.Report(&meshv1.PodReport{Uid: "gone"})
	for seen := 0; seen < 2; {
		seen += len(next(t, first.got).GetReport().GetPods())
	}
	client.Forget("gone")
	close(first.end)

	second := next(t, m.streams)
	require.NotNil(t, next(t, second.got).GetHello())
	require.False(t, client.InStep(), "the manager before it has gone")
	report := next(t, second.got).GetReport()
	require.Len(t, report.GetPods(), 1)
	assert.Equal(t, "ebpf", report.GetPods()[0].GetCapture())
	require.NoError(t, second.Send(synced))
	inStep(true)
	close(second.end)
	inStep(false)
}

// Reports that are too large for one message go in several, and one that no message
// has room for goes without what rules have done.
func TestLargeReportsAreSplit(t *testing.T) {
	m := New(Config{})
	states := func(n int) (out []*meshv1.FaultState) {
		for i := range n {
			out = append(out, &meshv1.FaultState{Key: strings.Repeat("k", 40), Matched: uint64(i)})
		}
		return out
	}
	for i := range 20 {
		m.Report(&meshv1.PodReport{Uid: strconv.Itoa(i), Capture: "ebpf", Faults: states(10_000)})
	}
	m.Report(&meshv1.PodReport{Uid: "huge", Capture: "ebpf", Faults: states(100_000)})
	got := map[string]int{}
	for pieces := 0; ; pieces++ {
		<-m.wake
		r := m.takeReport()
		require.LessOrEqual(t, proto.Size(r), maxReport+maxReport/64)
		for _, p := range r.GetPods() {
			require.Equal(t, "ebpf", p.GetCapture())
			got[p.GetUid()] = len(p.GetFaults())
		}
		if len(got) == 21 {
			require.Greater(t, pieces, 5)
			break
		}
	}
	require.Zero(t, got["huge"])
	require.Equal(t, 10_000, got["7"])
	require.Nil(t, m.takeReport())
}
