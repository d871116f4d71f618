package push

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

const agentUser = "system:serviceaccount:mesh:ctrlmesh-agent"

// reviewer knows tokens of the form USER@NODE.
type reviewer struct{ audiences []string }

func (r reviewer) Create(_ context.Context, review *authenticationv1.TokenReview, _ metav1.CreateOptions) (*authenticationv1.TokenReview, error) {
	user, node, ok := strings.Cut(review.Spec.Token, "@")
	if review.Spec.Token == "outage" {
		return nil, errors.New("could not review outage")
	}
	review.Status = authenticationv1.TokenReviewStatus{
		Authenticated: ok,
		Audiences:     r.audiences,
		User:          authenticationv1.UserInfo{Username: user, Extra: map[string]authenticationv1.ExtraValue{}},
	}
	if node != "" {
		review.Status.User.Extra[nodeClaim] = authenticationv1.ExtraValue{node}
	}
	return review, nil
}

type signer struct{}

func (signer) Sign(csr []byte) ([][]byte, error) {
	if len(csr) == 0 {
		return nil, errors.New("empty")
	}
	return [][]byte{[]byte("leaf"), []byte("ca")}, nil
}

type world struct {
	*Server
	t       *testing.T
	client  meshv1.MeshClient
	address string
	stop    context.CancelFunc
	ended   chan error
}

// start serves on loopback, over TLS.
func start(t *testing.T) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, corev1.AddToScheme(scheme))
	serving := &trust.Serving{
		Client:    fake.NewClientBuilder().WithScheme(scheme).Build(),
		Namespace: "mesh",
		Names:     trust.ManagerNames("mesh", "cluster.local", "ctrlmesh-manager"),
		Now:       time.Now,
	}
	require.NoError(t, serving.Load(t.Context()))
	w := &world{t: t, ended: make(chan error, 1), Server: &Server{
		Auth:   &Authenticator{Reviewer: reviewer{audiences: []string{meshv1.Audience}}, User: agentUser},
		Signer: signer{}, Changed: func() {}, Counted: func() {},
	}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	w.stop, w.address = cancel, l.Addr().String()
	go func() { w.ended <- w.Serve(ctx, l, serving.TLSConfig()) }()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(serving.Bundle())
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		RootCAs: roots, ServerName: "ctrlmesh-manager.mesh.svc",
	})))
	require.NoError(t, err)
	w.client = meshv1.NewMeshClient(conn)
	t.Cleanup(func() { conn.Close(); cancel() })
	return w
}

func as(ctx context.Context, token string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
}

// soon is when what must happen has happened, however busy the machine is.
const soon = 30 * time.Second

// agent is one end of a stream, with what it was sent.
type agent struct {
	t      *testing.T
	stream grpc.BidiStreamingClient[meshv1.AgentMessage, meshv1.ManagerMessage]
	cancel context.CancelFunc
}

func (w *world) connect(node string, versions map[string]string) *agent {
	w.t.Helper()
	return w.hello(&meshv1.Hello{Node: node, Versions: versions, Abilities: []string{"another", "traffic"}})
}

func (w *world) hello(h *meshv1.Hello) *agent {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	w.t.Cleanup(cancel)
	s, err := w.client.Connect(as(ctx, agentUser+"@"+h.Node))
	require.NoError(w.t, err)
	require.NoError(w.t, s.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Hello{Hello: h}}))
	return &agent{t: w.t, stream: s, cancel: cancel}
}

// world reads until Synced.
func (a *agent) world() (cluster string, policies map[string]string) {
	a.t.Helper()
	policies = map[string]string{}
	for {
		m, err := a.stream.Recv()
		require.NoError(a.t, err)
		switch k := m.Kind.(type) {
		case *meshv1.ManagerMessage_Cluster:
			require.Empty(a.t, cluster)
			require.Empty(a.t, policies, "Cluster comes first")
			cluster = k.Cluster.Version
		case *meshv1.ManagerMessage_Upsert:
			policies[k.Upsert.Uid] = k.Upsert.Version
		case *meshv1.ManagerMessage_Remove:
			policies[k.Remove.Uid] = "removed"
		case *meshv1.ManagerMessage_Synced:
			return cluster, policies
		}
	}
}

func (a *agent) next() *meshv1.ManagerMessage {
	a.t.Helper()
	m, err := a.stream.Recv()
	require.NoError(a.t, err)
	return m
}

func (a *agent) ack(uid, version, err string) {
	a.t.Helper()
	require.NoError(a.t, a.stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Ack{Ack: &meshv1.Ack{Uid: uid, Version: version, Error: err}}}))
}

func (a *agent) report(r *meshv1.PodReport) {
	a.t.Helper()
	require.NoError(a.t, a.stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Report{Report: &meshv1.Report{Pods: []*meshv1.PodReport{r}}}}))
}

// policies of the form UID@NODE=VERSION.
func policies(specs ...string) map[types.UID]compile.Policy {
	out := map[types.UID]compile.Policy{}
	for _, s := range specs {
		s, version, _ := strings.Cut(s, "=")
		uid, node, _ := strings.Cut(s, "@")
		out[types.UID(uid)] = compile.Policy{Node: node, PodPolicy: &meshv1.PodPolicy{Uid: uid, Version: version}}
	}
	return out
}

var cluster1 = &meshv1.Cluster{Version: "c1", ServiceAddresses: []string{"10.96.0.1:443"}}

func (w *world) await(cond func() bool) {
	w.t.Helper()
	require.Eventually(w.t, cond, soon, time.Millisecond)
}

func TestStateOfTheWorldThenDeltas(t *testing.T) {
	w := start(t)
	w.Set(cluster1, policies("a@n1=1", "b@n1=1", "c@n2=1", "d@=1"))
	a := w.connect("n1", nil)
	c, got := a.world()
	require.Equal(t, "c1", c)
	require.Equal(t, map[string]string{"a": "1", "b": "1"}, got, "only pods of its own node")

	w.Set(cluster1, policies("a@n1=1", "b@n1=2", "c@n2=2", "d@=1"))
	require.Equal(t, "2", a.next().GetUpsert().GetVersion())
	w.Set(cluster1, policies("a@n1=1", "c@n2=2", "d@n1=1"))
	seen := map[string]bool{}
	for range 2 {
		m := a.next()
		seen[m.GetRemove().GetUid()+m.GetUpsert().GetUid()] = true
	}
	require.Equal(t, map[string]bool{"b": true, "d": true}, seen)
	w.Set(&meshv1.Cluster{Version: "c2"}, policies("a@n1=1", "c@n2=2", "d@n1=1"))
	require.Equal(t, "c2", a.next().GetCluster().GetVersion())
}

// A manager that has just started knows nothing yet: it must say nothing.
func TestSilentUntilTheFirstSet(t *testing.T) {
	w := start(t)
	a := w.connect("n1", map[string]string{"a": "1"})
	w.await(func() bool { return w.Observe("n1", "a").Connected })
	w.Set(cluster1, policies("a@n1=1", "b@n1=1"))
	_, got := a.world()
	require.Equal(t, map[string]string{"a": "1", "b": "1"}, got)
}

// script is the manager's end of a stream whose messages come from a channel.
type script struct {
	meshv1.Mesh_ConnectServer
	messages chan *meshv1.AgentMessage
}

func (s script) Recv() (*meshv1.AgentMessage, error) {
	m, ok := <-s.messages
	if !ok {
		return nil, io.EOF
	}
	return m, nil
}

func TestReportsBeforeTheFirstSetAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{Changed: func() {}, Counted: func() {}}
		conn := script{messages: make(chan *meshv1.AgentMessage)}
		st := s.join("n1", conn, &meshv1.Hello{Node: "n1", Versions: map[string]string{"a": "1"}}, nil)
		go func() { _ = s.receive(t.Context(), "n1", st) }()
		go func() {
			conn.messages <- &meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Report{Report: &meshv1.Report{Pods: []*meshv1.PodReport{{Uid: "a", Capture: "ebpf", Version: "1"}}}}}
			close(conn.messages)
		}()
		synctest.Wait()
		s.Set(cluster1, policies("a@n1=1"))
		synctest.Wait()
		require.Equal(t, "ebpf", s.Observe("n1", "a").Capture)
	})
}

// An agent that does not read holds back nobody, and in the end gets the latest.
func TestLatestWinsForASlowAgent(t *testing.T) {
	w := start(t)
	big := strings.Repeat("x", 256<<10) // soon more than the windows of the connection hold
	set := func(version string) {
		p := policies("a@n1="+version, "b@n2="+version)
		p["a"].Refuse = big
		w.Set(cluster1, p)
	}
	set("0")
	slow, quick := w.connect("n1", nil), w.connect("n2", nil)
	quick.world()
	w.await(func() bool { return w.Observe("n1", "a").Connected })
	const rounds = 100
	for i := 1; i <= rounds; i++ {
		set(fmt.Sprint(i))
		require.Equal(t, fmt.Sprint(i), quick.next().GetUpsert().GetVersion())
	}
	w.mu.Lock()
	require.LessOrEqual(t, len(w.nodes["n1"].streams[0].dirty), 1)
	w.mu.Unlock()
	received := 0
	for last := ""; last != fmt.Sprint(rounds); {
		if u := slow.next().GetUpsert(); u != nil {
			last = u.Version
			received++
		}
	}
	require.Less(t, received, rounds, "what was superseded is not sent")
}

func TestAcksAndReports(t *testing.T) {
	w := start(t)
	changed := make(chan struct{}, 100)
	notify := func() { changed <- struct{}{} }
	w.Changed, w.Counted = notify, notify
	known := policies("a@n1=1", "other@n2=1")
	known["a"].Sharding = &meshv1.Sharding{Locks: []*meshv1.Lock{{Namespace: "ns", Name: "lock", UpstreamName: "lock---s"}}}
	w.Set(cluster1, known)
	a := w.connect("n1", map[string]string{"a": "1-x", "other": "1-x"})
	<-changed
	require.Equal(t, "1-x", w.Observe("n1", "a").Version, "what it holds since before")
	a.world()

	a.ack("a", "1", "bad\nselector"+strings.Repeat("!", 10_000))
	<-changed
	o := w.Observe("n1", "a")
	require.Equal(t, "1", o.Nacked)
	require.Contains(t, o.Nack, "bad selector")
	require.LessOrEqual(t, len(o.Nack), maxText)

	a.ack("a", "1", "")
	<-changed
	methods := map[string]string{"pods": "ServerSide"}
	a.report(&meshv1.PodReport{Uid: "a", Capture: "ebpf", Version: "1", Methods: methods, LockHolder: true})
	<-changed
	o = w.Observe("n1", "a")
	require.Equal(t, Observation{Connected: true, Reported: true, Capture: "ebpf", Version: "1", Methods: methods, LockReport: LockReport{LockHolder: true}}, o)

	dead := &meshv1.DeadHolder{Namespace: "ns", Name: "lock", Identity: "pod_1", ResourceVersion: "7"}
	for reported, want := range map[string][]Holder{
		"": {{"ns", "lock", "leases", "pod_1", "7"}}, "configmaps": {{"ns", "lock", "configmaps", "pod_1", "7"}}, "secrets": nil,
	} {
		dead.Resource = reported
		a.report(&meshv1.PodReport{Uid: "a", Capture: "ebpf", Version: "1", DeadHolders: []*meshv1.DeadHolder{dead}})
		<-changed
		require.Equal(t, want, w.Observe("n1", "a").Dead)
		require.Equal(t, want != nil, w.Exits()["a"])
	}
	dead.Resource = ""
	dead.Identity = strings.Repeat("x", meshv1.MaxIdentity+1)
	a.report(&meshv1.PodReport{Uid: "a", Capture: "ebpf", Version: "1", DeadHolders: []*meshv1.DeadHolder{dead}})
	<-changed
	require.Zero(t, w.Observe("n1", "a").Dead)

	refused := &meshv1.PodReport{Uid: "a", Capture: "ebpf", Version: "1", LockRefusals: []*meshv1.LockRefusal{{Namespace: "ns", Name: "lock", Resource: "leases", Verb: "get", Code: 403}}}
	a.report(refused)
	<-changed
	require.Equal(t, []LockRefusal{{Namespace: "ns", Name: "lock", Resource: "leases", Verb: "get", Code: 403}}, w.Observe("n1", "a").Refusals)
	refused.LockRefusals = nil
	a.report(refused)
	<-changed
	require.Empty(t, w.Observe("n1", "a").Refusals, "it was updated since")

	// An agent has no say about pods of other nodes.
	a.report(&meshv1.PodReport{Uid: "other", Capture: "ebpf", Version: "1"})
	<-changed
	require.False(t, w.Observe("n2", "other").Reported)
	require.False(t, w.Observe("n1", "other").Reported)

	a.cancel()
	w.await(func() bool { return !w.Observe("n1", "a").Connected })
	o = w.Observe("n1", "a")
	require.Equal(t, "ebpf", o.Capture, "what it said last is kept")
	require.False(t, o.Left.IsZero())
}

// A policy that was in force but not saved is rejected. Once a report says that it is saved
// too, it is not rejected any more.
func TestReportOfARejectedPolicyClearsTheRejection(t *testing.T) {
	w := start(t)
	w.Set(cluster1, policies("a@n1=2"))
	a := w.connect("n1", nil)
	a.world()
	a.ack("a", "2", "disk full")
	w.await(func() bool { return w.Observe("n1", "a").Nacked == "2" })
	a.report(&meshv1.PodReport{Uid: "a", Capture: "ebpf"})
	w.await(func() bool { return w.Observe("n1", "a").Reported })
	require.Equal(t, "2", w.Observe("n1", "a").Nacked, "not saved yet")
	a.report(&meshv1.PodReport{Uid: "a", Capture: "ebpf", Version: "2"})
	w.await(func() bool { return w.Observe("n1", "a").Version == "2" })
	require.Empty(t, w.Observe("n1", "a").Nacked)
}

// While an agent is replaced, the newest that captures a pod is believed, and a
// policy is in force when it is in all that serve the pod.
func TestTwoAgentsOfOneNode(t *testing.T) {
	w := start(t)
	w.Set(cluster1, policies("a@n1=1"))
	before := w.connect("n1", nil)
	before.world()
	before.report(&meshv1.PodReport{Uid: "a", Capture: "ebpf", Version: "1", LockHolder: true})
	w.await(func() bool { return w.Observe("n1", "a").Capture == "ebpf" })
	after := w.connect("n1", nil)
	after.world()
	after.report(&meshv1.PodReport{Uid: "a", Version: "1", Message: "not yet"})
	after.ack("a", "0", "seen") // so that the report is in
	w.await(func() bool { _, nacked := w.seen("n1", 1, "a"); return nacked == "0" })
	require.Equal(t, Observation{Connected: true, Reported: true, Capture: "ebpf", Version: "1", LockReport: LockReport{LockHolder: true}}, w.Observe("n1", "a"))

	// Handed over: the new one captures, the old one drains.
	after.report(&meshv1.PodReport{Uid: "a", Capture: "iptables", Version: "1"})
	w.await(func() bool { return w.Observe("n1", "a").Capture == "iptables" })
	w.Set(cluster1, policies("a@n1=2"))
	after.ack("a", "2", "")
	w.await(func() bool { v, _ := w.seen("n1", 1, "a"); return v == "2" })
	require.NotEqual(t, "2", w.Observe("n1", "a").Version, "requests in flight are held to the old policy still")
	before.ack("a", "2", "cannot")
	w.await(func() bool { return w.Observe("n1", "a").Nacked == "2" })
	before.ack("a", "2", "")
	w.await(func() bool { return w.Observe("n1", "a").Version == "2" })
	require.Empty(t, w.Observe("n1", "a").Nacked)

	before.cancel()
	w.await(func() bool { w.mu.Lock(); defer w.mu.Unlock(); return len(w.nodes["n1"].streams) == 1 })
	o := w.Observe("n1", "a")
	require.True(t, o.Connected)
	require.Equal(t, "iptables", o.Capture)
	require.Equal(t, "2", o.Version)
}

// seen is what one stream of a node said of a pod.
// It has its pods from the one before, and serves them before it says so.
func TestASuccessorThatHasOnlySaidHello(t *testing.T) {
	s := &Server{Changed: func() {}, Counted: func() {}}
	s.Set(cluster1, policies("a@n1=1-x"))
	before := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
	s.report("n1", before, &meshv1.Report{Pods: []*meshv1.PodReport{{Uid: "a", Capture: "ebpf", Version: "1-x"}}})
	after := s.join("n1", nil, &meshv1.Hello{Node: "n1", Versions: map[string]string{"a": "1-x"}}, nil)
	s.Set(cluster1, policies("a@n1=2-x"))
	s.ack("n1", before, &meshv1.Ack{Uid: "a", Version: "2-x"})
	require.Equal(t, "1-x", s.Observe("n1", "a").Version)
	s.ack("n1", after, &meshv1.Ack{Uid: "a", Version: "2-x"})
	require.Equal(t, "2-x", s.Observe("n1", "a").Version)
}

func (w *world) seen(node string, stream int, uid string) (version, nacked string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.nodes[node].streams[stream].seen[uid]
	return o.Version, o.Nacked
}

// What an agent said of a policy says nothing any more once it was sent another, as
// long as it has not said so again.
func TestAnOldAckOfTheSamePolicy(t *testing.T) {
	for first, stands := range map[string]bool{"refused": false, "7-x": true} {
		s := &Server{Changed: func() {}, Counted: func() {}}
		s.Set(cluster1, policies("a@n1="+first))
		st := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
		hear := func() (version string) {
			for m := s.next("n1", st); m != nil; m = s.next("n1", st) {
				version = m.GetUpsert().GetVersion() + version
			}
			return version
		}
		require.Equal(t, first, hear())
		s.report("n1", st, &meshv1.Report{Pods: []*meshv1.PodReport{{Uid: "a", Capture: "ebpf", Version: first}}})
		require.Equal(t, first, s.Observe("n1", "a").Version)
		s.Set(cluster1, policies("a@n1=unsharded"))
		require.Equal(t, "unsharded", hear(), "it is on its way to the agent")
		s.Set(cluster1, policies("a@n1="+first))
		require.Equal(t, stands, s.Observe("n1", "a").Version == first)
		require.Equal(t, first, hear())
		s.ack("n1", st, &meshv1.Ack{Uid: "a", Version: first})
		require.Equal(t, first, s.Observe("n1", "a").Version)
	}
}

// What an agent let through takes effect for a while after it died, whatever the
// next one says.
func TestAnAgentThatDied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{Changed: func() {}, Counted: func() {}}
		s.Set(cluster1, policies("a@n1=1-x"))
		before := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
		s.report("n1", before, &meshv1.Report{Pods: []*meshv1.PodReport{{Uid: "a", Capture: "ebpf", Version: "1-x"}}})
		s.Set(cluster1, policies("a@n1=2-x"))
		s.leave("n1", before)
		changed := make(chan struct{}, 1)
		s.Changed = func() { changed <- struct{}{} }
		after := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
		<-changed
		s.report("n1", after, &meshv1.Report{Pods: []*meshv1.PodReport{{Uid: "a", Capture: "ebpf", Version: "2-x"}}})
		<-changed
		time.Sleep(meshv1.LostWrite - time.Millisecond)
		require.Equal(t, "1-x", s.Observe("n1", "a").Version)
		<-changed
		require.Equal(t, "2-x", s.Observe("n1", "a").Version)
	})
}

func TestWhatNodesCan(t *testing.T) {
	w := start(t)
	w.Set(cluster1, nil)
	able, not := w.HostNetwork()
	require.Zero(t, able)
	require.Empty(t, not)
	for _, h := range []*meshv1.Hello{
		{Node: "n1", HostNetwork: true, Captures: []string{"ebpf", "iptables"}},
		{Node: "n2", HostNetworkReason: "cgroup\nv1" + strings.Repeat("!", 10_000), Captures: []string{"iptables"}},
		{Node: "n3"},
		{Node: "n4", Captures: []string{"anything"}},
	} {
		w.hello(h).world()
	}
	able, not = w.HostNetwork()
	require.Equal(t, 1, able)
	require.Len(t, not, 3)
	require.Contains(t, not["n2"], "cgroup v1")
	require.LessOrEqual(t, len(not["n2"]), maxText)
	require.Contains(t, not["n3"], "too old")
	require.Equal(t, map[string]int{"ebpf": 1, "iptables": 1}, w.Captures(), "bounded")
}

// A peer that sends one bogus token after another has its own few calls under
// way, and the others theirs.
func TestBogusTokensDoNotStarveAgents(t *testing.T) {
	from := func(address string) context.Context {
		a, err := net.ResolveTCPAddr("tcp", address)
		require.NoError(t, err)
		return peer.NewContext(t.Context(), &peer.Peer{Addr: a})
	}
	var g reviewLimiter
	var leave []func()
	for i := range 3 * maxCallsPerPeer {
		l, err := g.enter(from(fmt.Sprintf("10.0.0.66:%d", 1000+i)))
		if i < maxCallsPerPeer {
			require.NoError(t, err)
			leave = append(leave, l)
		} else {
			require.Equal(t, codes.ResourceExhausted, status.Code(err), "at once, not after a wait")
		}
	}
	l, err := g.enter(from("[::ffff:10.0.0.7]:1000"))
	require.NoError(t, err, "an agent")
	l()

	// Many of them fill all slots: an agent waits for one of the reviews under way.
	for i := range maxReviews - maxCallsPerPeer {
		l, err := g.enter(from(fmt.Sprintf("10.0.1.%d:1000", i)))
		require.NoError(t, err)
		leave = append(leave, l)
	}
	entered := make(chan func())
	go func() {
		l, err := g.enter(from("10.0.0.7:1000"))
		if err == nil {
			entered <- l
		}
	}()
	require.Eventually(t, func() bool { g.mu.Lock(); defer g.mu.Unlock(); return g.calls["10.0.0.7"] == 1 }, soon, time.Millisecond)
	require.Len(t, g.slots, maxReviews)
	require.Empty(t, entered)
	leave[0]()
	(<-entered)()
	gone, cancel := context.WithCancel(from("10.0.0.8:1000"))
	cancel()
	if l, err := g.enter(gone); err == nil {
		l()
	}
	for _, l := range leave[1:] {
		l()
	}
	require.Empty(t, g.calls, "nothing is kept of those who left")
	require.Empty(t, g.slots)
}

func TestTooManyStreams(t *testing.T) {
	w := start(t)
	w.Set(cluster1, policies("a@n1=1"))
	first := w.connect("n1", nil)
	first.world()
	for range maxStreamsPerNode {
		w.connect("n1", nil).world()
	}
	_, err := first.stream.Recv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
}

func TestStreamComesOfAge(t *testing.T) {
	w := start(t)
	w.StreamLife = 20 * time.Millisecond
	w.Set(cluster1, nil)
	s, err := w.client.Connect(as(t.Context(), agentUser+"@n1"))
	require.NoError(t, err)
	_ = s.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Hello{Hello: &meshv1.Hello{Node: "n1"}}}) // it may be of age already
	for err == nil {
		_, err = s.Recv()
	}
	require.Equal(t, codes.Unavailable, status.Code(err))
}

func TestStopEndsStreams(t *testing.T) {
	w := start(t)
	w.Set(cluster1, nil)
	a := w.connect("n1", nil)
	a.world()
	w.stop()
	require.NoError(t, <-w.ended)
	_, err := a.stream.Recv()
	require.Error(t, err)
}

func TestWhoMayConnect(t *testing.T) {
	w := start(t)
	w.Set(cluster1, policies("a@n1=1"))
	hello := func(ctx context.Context, node string) codes.Code {
		s, err := w.client.Connect(ctx)
		require.NoError(t, err)
		// Refused already, perhaps: the answer is what counts.
		_ = s.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Hello{Hello: &meshv1.Hello{Node: node}}})
		m, err := s.Recv()
		require.Nil(t, m)
		return status.Code(err)
	}
	ctx := t.Context()
	require.Equal(t, codes.Unauthenticated, hello(ctx, "n1"), "no token")
	require.Equal(t, codes.Unauthenticated, hello(as(ctx, "rubbish"), "n1"))
	require.Equal(t, codes.Unauthenticated, hello(as(ctx, "system:serviceaccount:evil:ctrlmesh-agent@n1"), "n1"))
	require.Equal(t, codes.Unauthenticated, hello(as(ctx, agentUser+"@"), "n1"), "no node")
	require.Equal(t, codes.PermissionDenied, hello(as(ctx, agentUser+"@n2"), "n1"), "another node")
	require.Equal(t, codes.Unavailable, hello(as(ctx, "outage"), "n1"))
	require.Equal(t, codes.Unauthenticated, hello(as(as(ctx, agentUser+"@n1"), agentUser+"@n2"), "n1"), "two tokens")

	// Not a hello first.
	s, err := w.client.Connect(as(ctx, agentUser+"@n1"))
	require.NoError(t, err)
	require.NoError(t, s.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Report{Report: &meshv1.Report{}}}))
	_, err = s.Recv()
	require.Equal(t, codes.InvalidArgument, status.Code(err))

	_, err = w.client.SignLeaf(ctx, &meshv1.SignLeafRequest{Csr: []byte("x")})
	require.Equal(t, codes.Unauthenticated, status.Code(err))
	_, err = w.client.SignLeaf(as(ctx, agentUser+"@n1"), &meshv1.SignLeafRequest{})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	r, err := w.client.SignLeaf(as(ctx, agentUser+"@n1"), &meshv1.SignLeafRequest{Csr: []byte("x")})
	require.NoError(t, err)
	require.Len(t, r.Chain, 2)
}

type egressSigner struct{}

func (egressSigner) SignFor(csr []byte, host string) ([][]byte, error) {
	if host != "example.com" {
		return nil, errors.New("the host stands for the apiserver")
	}
	return [][]byte{csr, []byte("ca")}, nil
}

func TestWhoIsSignedForOtherHosts(t *testing.T) {
	w := start(t)
	w.EgressSigner = egressSigner{}
	p := policies("a@n1=1", "b@n1=1", "c@n2=1")
	p["a"].Traffic = &meshv1.Traffic{Egress: &meshv1.Egress{Decrypt: true}}
	p["c"].Traffic = &meshv1.Traffic{Egress: &meshv1.Egress{}}
	w.Set(cluster1, p)
	sign := func(ctx context.Context, host string) codes.Code {
		r, err := w.client.SignEgressLeaf(ctx, &meshv1.SignEgressLeafRequest{Csr: []byte("x"), Host: host})
		if err == nil {
			require.Len(t, r.Chain, 2)
		}
		return status.Code(err)
	}
	n1 := as(t.Context(), agentUser+"@n1")
	require.Equal(t, codes.OK, sign(n1, "example.com"))
	require.Equal(t, codes.InvalidArgument, sign(n1, "kubernetes"))
	require.Equal(t, codes.InvalidArgument, sign(n1, "\xc3\xa4\n"))
	require.Equal(t, codes.Unauthenticated, sign(t.Context(), "example.com"))
	require.Equal(t, codes.Unauthenticated, sign(as(t.Context(), "system:serviceaccount:evil:ctrlmesh-agent@n1"), "example.com"))
	for _, node := range []string{"n2", "n3"} { // no pod that opted in; no pod
		require.Equal(t, codes.PermissionDenied, sign(as(t.Context(), agentUser+"@"+node), "example.com"))
	}
	last := codes.OK
	for range 2 * egressBurst {
		if last = sign(n1, "example.com"); last != codes.OK {
			break
		}
	}
	require.Equal(t, codes.ResourceExhausted, last)

	w.Set(cluster1, policies("a@n1=2", "b@n1=1"))
	require.Equal(t, codes.PermissionDenied, sign(n1, "example.com"), "the pod has gone")
}

// An apiserver that ignores audiences says nothing of them.
func TestAudienceMustBeEchoed(t *testing.T) {
	a := &Authenticator{Reviewer: reviewer{}, User: agentUser}
	_, err := a.Node(t.Context(), agentUser+"@n1")
	require.ErrorIs(t, err, errRefused)
	a.Reviewer = reviewer{audiences: []string{meshv1.Audience}}
	node, err := a.Node(t.Context(), agentUser+"@n1")
	require.NoError(t, err)
	require.Equal(t, "n1", node)
	_, err = a.Node(t.Context(), "outage")
	require.NotContains(t, err.Error(), "outage", "an error must not quote the token")
}

// Of what an agent says of rules only that is kept which can be.
func TestRuleStates(t *testing.T) {
	w := start(t)
	changed, counted := make(chan struct{}, 10), make(chan struct{}, 10)
	w.Changed, w.Counted = func() { changed <- struct{}{} }, func() { counted <- struct{}{} }
	p := policies("a@n1=1")
	p["a"].Traffic = &meshv1.Traffic{
		Breakers:   []*meshv1.Breaker{{Name: "b", Rules: []*meshv1.LimitRule{{Key: "k1"}, {Key: "k2"}}}},
		Injections: []*meshv1.Injection{{Name: "i", Rules: []*meshv1.FaultRule{{Key: "f"}}}},
	}
	w.Set(cluster1, p)
	a := w.connect("n1", nil)
	<-changed
	a.world()
	now := time.Now().UnixMilli()
	say := func(passed uint64) {
		a.report(&meshv1.PodReport{Uid: "a", Capture: "ebpf", Version: "1", EgressMessage: "why\nnot",
			Rules: []*meshv1.RuleState{
				{Key: "k1", State: meshv1.BreakerState_BREAKER_OPENED, SinceMs: now, Passed: passed},
				{Key: "k1", Passed: 9},
				{Key: "k2", State: 77, SinceMs: 1 << 62, Refused: 4},
				{Key: "another's"}, nil,
			},
			Faults: []*meshv1.FaultState{{Key: "f", Matched: 2, Injected: 1}, {Key: "f"}, {Key: "k1"}, nil},
		})
	}
	say(7)
	<-changed
	o := w.Observe("n1", "a")
	require.Equal(t, "why not", o.EgressMessage)
	require.Len(t, o.Rules, 2)
	require.Len(t, o.Faults, 1)
	require.True(t, proto.Equal(&meshv1.RuleState{Key: "k1", State: meshv1.BreakerState_BREAKER_OPENED, SinceMs: now, Passed: 7}, o.Rules["k1"]), o.Rules["k1"])
	require.True(t, proto.Equal(&meshv1.RuleState{Key: "k2", Refused: 4}, o.Rules["k2"]), o.Rules["k2"])
	require.True(t, proto.Equal(&meshv1.FaultState{Key: "f", Matched: 2, Injected: 1}, o.Faults["f"]), o.Faults["f"])

	say(8)
	<-counted
	require.EqualValues(t, 8, w.Observe("n1", "a").Rules["k1"].Passed)
	require.Empty(t, changed, "nothing else did")
}

// A policy may be in force without its rules: they cannot be, or the agent does not
// know of any.
func TestPoliciesWithoutTheirRules(t *testing.T) {
	w := start(t)
	changed := make(chan struct{}, 10)
	w.Changed = func() { changed <- struct{}{} }
	w.Set(cluster1, policies("a@n1=1"))
	a := w.connect("n1", nil)
	<-changed
	a.world()
	require.False(t, w.Observe("n1", "a").NoTraffic)
	require.NoError(t, a.stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Ack{Ack: &meshv1.Ack{Uid: "a", Version: "1", TrafficError: "bad\nbucket"}}}))
	<-changed
	o := w.Observe("n1", "a")
	require.Equal(t, []string{"1", "", "bad bucket"}, []string{o.Version, o.Nacked, o.TrafficMessage})
	a.report(&meshv1.PodReport{Uid: "a", Capture: "ebpf", Version: "1", TrafficMessage: "bad rule"})
	<-changed
	require.Equal(t, "bad rule", w.Observe("n1", "a").TrafficMessage)

	old := w.hello(&meshv1.Hello{Node: "n1"})
	<-changed
	old.world()
	require.True(t, w.Observe("n1", "a").NoTraffic)
	old.ack("a", "1", "")
	<-changed
	require.Equal(t, "bad rule", w.Observe("n1", "a").TrafficMessage, "of the other, which serves it too")
	a.ack("a", "1", "")
	<-changed
	require.Empty(t, w.Observe("n1", "a").TrafficMessage)
}

// TestObservedLocksAreBounded checks what one agent's report can make the manager keep.
func TestObservedLocksAreBounded(t *testing.T) {
	lock := func(namespace, name, resource string) *meshv1.ObservedLock {
		return &meshv1.ObservedLock{Namespace: namespace, Name: name, Resource: resource, Holder: "a\nb", Written: true}
	}
	require.Equal(t, []ObservedLock{{"a", "b", "leases", "a b", true}, {"kube-system", "op", "leases", "a b", true}},
		observedLocks([]*meshv1.ObservedLock{
			lock("kube-system", "op", "leases"), lock("kube-system", "op", "secrets"), lock("", "op", "leases"), lock("a", "B/c", "leases"), lock("a", "b", "leases"),
		}))
	var many []*meshv1.ObservedLock
	for range 100 {
		many = append(many, lock("a", "b", "leases"))
	}
	require.Len(t, observedLocks(many), meshv1.MaxLocks)
	require.Equal(t, []string{"a/b", "c/d"}, heldLocks([]string{"c/d", "a/b"}))
}

// TestLockRefusalsAreBounded checks what one agent's report can make a status say.
func TestLockRefusalsAreBounded(t *testing.T) {
	policy := &meshv1.PodPolicy{Sharding: &meshv1.Sharding{Locks: []*meshv1.Lock{
		{Namespace: "ns", Name: "b", UpstreamName: "b---s"}, {Namespace: "ns", Name: "a", UpstreamName: "a---s"},
	}}}
	refusal := func(name, resource, verb string, code uint32) *meshv1.LockRefusal {
		return &meshv1.LockRefusal{Namespace: "ns", Name: name, Resource: resource, Verb: verb, Code: code, Message: "x\ny"}
	}
	require.Equal(t, []LockRefusal{{"ns", "a", "configmaps", "create", 403, "x y"}, {"ns", "b", "leases", "get", 404, "x y"}}, lockRefusals(policy, []*meshv1.LockRefusal{
		refusal("b", "leases", "get", 404), refusal("a", "configmaps", "create", 403),
		refusal("a---s", "leases", "get", 404), refusal("a", "secrets", "get", 404), refusal("a", "leases", "read this", 404), refusal("a", "leases", "get", 200),
	}))
	require.Empty(t, lockRefusals(&meshv1.PodPolicy{}, []*meshv1.LockRefusal{refusal("a", "leases", "get", 404)}), "a pod without locks")
	long := refusal("a", "leases", "get", 404)
	long.Message = strings.Repeat("é", maxText)
	many := slices.Repeat([]*meshv1.LockRefusal{long}, 100)
	out := lockRefusals(policy, many)
	require.Len(t, out, meshv1.MaxLockRefusals)
	require.LessOrEqual(t, len(out[0].Message), meshv1.MaxRefusalMessage)
}

// A policy that an agent does not receive once kept its whole node out of step.
func TestPolicyTooLargeForAnAgentIsHeldBackAlone(t *testing.T) {
	w := start(t)
	p := policies("small@n1=1", "large@n1=1")
	p["large"].Refuse = strings.Repeat("x", meshv1.MaxSmallPolicyBytes)
	w.Set(cluster1, p)
	_, sent := w.connect("n1", nil).world()
	require.Equal(t, map[string]string{"small": "1"}, sent)
	o := w.Observe("n1", "large")
	require.Equal(t, "1", o.Nacked)
	require.Contains(t, o.Nack, "larger than its agent receives: upgrade the agent of node n1")

	t.Run("and pushed to one that receives it", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		s, err := w.client.Connect(as(ctx, agentUser+"@n1"), grpc.MaxCallRecvMsgSize(meshv1.MaxMessageBytes))
		require.NoError(t, err)
		require.NoError(t, s.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Hello{Hello: &meshv1.Hello{Node: "n1", Abilities: []string{meshv1.AbilityLargePolicies}}}}))
		_, sent := (&agent{t: t, stream: s, cancel: cancel}).world()
		require.Equal(t, map[string]string{"small": "1", "large": "1"}, sent)
	})
}

// An agent that does not know standby would let a pod in standby act on everything.
func TestShardIsNotGivenToAnOlderAgent(t *testing.T) {
	w := start(t)
	p := policies("plain@n1=1", "standby@n1=1", "locks@n1=1", "dry@n1=1", "refused@n1=1")
	p["plain"].Sharding = &meshv1.Sharding{Shard: "s", ReadAll: true}
	p["standby"].Sharding = &meshv1.Sharding{Shard: "s", Standby: true}
	p["locks"].Sharding = &meshv1.Sharding{Shard: "s", Locks: []*meshv1.Lock{{Namespace: "ns", Name: "a", UpstreamName: "a---s"}}}
	p["dry"].Sharding = &meshv1.Sharding{Shard: "s", DryRun: true}
	p["refused"].Refuse = "it is in no shard"
	w.Set(cluster1, p)
	older := w.connect("n1", nil)
	_, sent := older.world()
	require.Equal(t, map[string]string{"plain": "1", "refused": "1"}, sent)
	for _, uid := range []string{"standby", "locks", "dry"} {
		o := w.Observe("n1", uid)
		require.Equal(t, "1", o.Nacked, uid)
		require.Contains(t, o.Nack, "upgrade the agent of node n1", uid)
		require.NotEqual(t, "1", o.Version, uid)
	}
	older.cancel()

	_, sent = w.hello(&meshv1.Hello{Node: "n1", Abilities: []string{meshv1.AbilityStandby}}).world()
	require.Len(t, sent, 5)
}

func TestPoliciesAreWithheldFromOlderAgents(t *testing.T) {
	limit := func(m ...*meshv1.ResourceMatch) *meshv1.PodPolicy {
		return &meshv1.PodPolicy{Traffic: &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Rules: []*meshv1.LimitRule{{Resources: m}}}}}}
	}
	fault := func(m ...*meshv1.ResourceMatch) *meshv1.PodPolicy {
		return &meshv1.PodPolicy{Traffic: &meshv1.Traffic{Injections: []*meshv1.Injection{{Rules: []*meshv1.FaultRule{{Resources: m}}}}}}
	}
	shard := func(s *meshv1.Sharding) *meshv1.PodPolicy { return &meshv1.PodPolicy{Sharding: s} }
	namespaced := &meshv1.ResourceMatch{Scope: meshv1.RequestScope_REQUEST_SCOPE_NAMESPACED}
	for ability, c := range map[string]struct {
		says     string
		withheld []*meshv1.PodPolicy
	}{
		meshv1.AbilityClusterScoped: {"clusterScoped of roots", []*meshv1.PodPolicy{shard(&meshv1.Sharding{ClusterScopedOwner: "op-default"})}},
		meshv1.AbilityUserAgents: {"User-Agents of configurations", []*meshv1.PodPolicy{
			shard(&meshv1.Sharding{UserAgent: "a"}), shard(&meshv1.Sharding{UserAgentPrefix: "a/"}), shard(&meshv1.Sharding{DeniedUserAgents: []string{"a"}}),
		}},
		meshv1.AbilityRequestScope: {"scope of rules", []*meshv1.PodPolicy{limit(&meshv1.ResourceMatch{}, namespaced), fault(namespaced)}},
		meshv1.AbilityClusters: {"clusters", []*meshv1.PodPolicy{
			{ClusterPaths: []string{"/clusters/*"}}, limit(&meshv1.ResourceMatch{Clusters: []string{"m1"}}), fault(&meshv1.ResourceMatch{Clusters: []string{"m1"}}),
		}},
		meshv1.AbilityMemberNamespaces: {"namespaces of member clusters", []*meshv1.PodPolicy{{ClusterPaths: []string{"/clusters/*"}, Sharding: &meshv1.Sharding{Key: meshv1.Key_KEY_NAMESPACE}}}},
		meshv1.AbilityShadow:           {"shadows", []*meshv1.PodPolicy{shard(&meshv1.Sharding{Shadow: &meshv1.Shadow{}})}},
	} {
		t.Run(ability, func(t *testing.T) {
			w := start(t)
			p := policies("plain@n1=1", "sharded@n1=1", "limited@n1=1")
			p["sharded"].Sharding, p["limited"].Traffic = &meshv1.Sharding{Shard: "s"}, limit(&meshv1.ResourceMatch{}).Traffic
			passed := map[string]string{"plain": "1", "sharded": "1", "limited": "1"}
			for i, content := range c.withheld {
				uid := types.UID(fmt.Sprint("withheld-", i))
				p[uid] = policies(string(uid) + "@n1=1")[uid]
				p[uid].Sharding, p[uid].Traffic, p[uid].ClusterPaths = content.Sharding, content.Traffic, content.ClusterPaths
			}
			w.Set(cluster1, p)
			others := slices.DeleteFunc([]string{
				meshv1.AbilityTraffic, meshv1.AbilityStandby, meshv1.AbilityClusterScoped, meshv1.AbilityUserAgents, meshv1.AbilityRequestScope,
				meshv1.AbilityClusters, meshv1.AbilityMemberNamespaces, meshv1.AbilityShadow,
			}, func(a string) bool { return a == ability })
			older := w.hello(&meshv1.Hello{Node: "n1", Abilities: others})
			_, sent := older.world()
			require.Equal(t, passed, sent)
			for i := range c.withheld {
				require.Contains(t, w.Observe("n1", fmt.Sprint("withheld-", i)).Nack, c.says+": upgrade the agent of node n1")
			}
			older.cancel()

			_, sent = w.hello(&meshv1.Hello{Node: "n1", Abilities: append(others, ability)}).world()
			require.Len(t, sent, len(p))
		})
	}
}

func TestWebhooksFollowThePolicies(t *testing.T) {
	w := start(t)
	w.Set(cluster1, policies("a@n1=1"))
	webhooks := func(version string) map[string]*meshv1.Webhooks {
		return map[string]*meshv1.Webhooks{"n1": {Version: version}, "n2": {Version: "x"}}
	}
	a := w.connect("n1", nil)
	a.world()
	w.SetWebhooks(webhooks("1"))
	require.Equal(t, "1", a.next().GetWebhooks().GetVersion())
	w.SetWebhooks(webhooks("1"))
	w.SetWebhooks(webhooks("2"))
	require.Equal(t, "2", a.next().GetWebhooks().GetVersion(), "the same is sent once")
	w.SetWebhooks(nil)
	last := a.next().GetWebhooks()
	require.NotNil(t, last)
	require.Empty(t, last.GetVersion())

	w.SetWebhooks(webhooks("3"))
	b := w.connect("n1", nil)
	b.world()
	require.Equal(t, "3", b.next().GetWebhooks().GetVersion(), "after Synced")
}
