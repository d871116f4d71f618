package node

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cachetesting "k8s.io/client-go/tools/cache/testing"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/control"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// soon is when what must happen has happened, however busy the machine is.
const soon = 30 * time.Second

// fakeBackend is a node on which every capture fails: what the loop does around it.
type fakeBackend struct {
	mu           sync.Mutex
	failures     int // of SetDestinations, still to come
	destinations []netip.AddrPort
	swept        func(uid string) bool
	checks       atomic.Int64
	repairs      atomic.Bool
}

func (*fakeBackend) Modes() []capture.Mode               { return []capture.Mode{capture.EBPF} }
func (*fakeBackend) HostNetwork() error                  { return nil }
func (*fakeBackend) Unavailable() map[capture.Mode]error { return nil }
func (*fakeBackend) CheckInterval() time.Duration        { return 500 * time.Millisecond }
func (n *fakeBackend) Check(repair bool) []capture.Loss {
	n.checks.Add(1)
	n.repairs.Store(repair)
	return nil
}
func (n *fakeBackend) SetDestinations(d, _ []netip.AddrPort) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.failures > 0 {
		n.failures--
		return errors.New("a pod is on its way out")
	}
	n.destinations = d
	return nil
}
func (*fakeBackend) Capture(capture.Request) (*capture.Pod, error) {
	return nil, errors.New("not here")
}
func (n *fakeBackend) Sweep(keep func(uid string) bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.swept = keep
	return nil
}
func (*fakeBackend) Close() error { return nil }

func noEvents() *telemetry.Recorder { return telemetry.NewRecorder(func(*eventsv1.Event) {}, "node1") }

// running is a node whose loop runs.
type running struct {
	*Node
	handler
	backend   *fakeBackend
	apiserver *cachetesting.FakeControllerSource
	cgroups   string
	proc      string
	log       *bytes.Buffer // the loop's alone, until it ends
	mu        sync.Mutex
	reports   map[string]*meshv1.PodReport
	gone      []string
}

func start(t *testing.T, failures int) *running {
	t.Helper()
	return startIn(t, t.TempDir(), failures)
}

// startIn starts an agent whose journal is in a folder of several agents.
func startIn(t *testing.T, journals string, failures int) *running {
	t.Helper()
	writes, err := journal.Create(journals)
	require.NoError(t, err)
	t.Cleanup(writes.Abandon)
	log := &bytes.Buffer{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	cgroups, proc := t.TempDir(), t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(cgroups, "kubepods"), 0o755))
	for _, pid := range []string{"1", "self"} { // the node's network is this process's
		require.NoError(t, os.MkdirAll(filepath.Join(proc, pid, "ns"), 0o755))
		require.NoError(t, os.Symlink("/proc/self/ns/net", filepath.Join(proc, pid, "ns/net")))
	}
	locator, err := pods.NewLocator(cgroups, proc)
	require.NoError(t, err)
	store, err := state.Open(t.TempDir())
	require.NoError(t, err)
	server, err := proxy.New(proxy.Config{Leaf: func() (*tls.Certificate, error) { return nil, errors.New("none") }})
	require.NoError(t, err)

	r := &running{backend: &fakeBackend{failures: failures}, cgroups: cgroups, proc: proc, log: log, apiserver: cachetesting.NewFakeControllerSource(), reports: map[string]*meshv1.PodReport{}}
	r.Node = New(Config{
		Locator: locator, Capture: r.backend, Proxy: server, Store: store, Journal: writes, Manager: r,
		RenewLeaf: func() {}, Events: noEvents(), Metrics: telemetry.NewMetrics(prometheus.NewRegistry()),
		Logger: logger,
	})
	r.earlier.Predecessor, r.earlier.Own = takeover.ID{1, 1}, takeover.ID{2, 2}
	writes.Serving(r.earlier.Own)
	ctx, cancel := context.WithCancel(t.Context())
	r.handler = handler{ctx, r.Node}
	require.NoError(t, r.Watch(ctx, r.apiserver))
	// The API lists no pods yet. A test may add some that it does not list, which the loop
	// would remove if the first list came later.
	<-r.podsPing
	r.presence.sync()
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return r
}

// Report implements Manager.
func (r *running) Report(p *meshv1.PodReport) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reports[p.GetUid()] = p
}

// Forget implements Manager.
func (r *running) Forget(uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gone = append(r.gone, uid)
}

// soon waits until cond holds in the loop.
func (r *running) soon(t *testing.T, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		ok := false
		_ = r.do(t.Context(), func() error { ok = cond(); return nil })
		return ok
	}, soon, 5*time.Millisecond, what)
}

// setPolicy says what the manager says.
func setPolicy(t *testing.T, h control.Handler, p *meshv1.PodPolicy) (settled <-chan struct{}) {
	t.Helper()
	applied, err := h.SetPolicy(p)
	require.NoError(t, err)
	return applied.Settled
}

func (r *running) reported(uid string) *meshv1.PodReport {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reports[uid]
}

func podObject(uid, trust string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "pod-" + uid, UID: types.UID(uid), CreationTimestamp: metav1.Now(),
		Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"},
	}}
	if trust != "" {
		p.Annotations = map[string]string{v1alpha1.TrustAnnotation: trust}
	}
	return p
}

func (r *running) create(t *testing.T, p *corev1.Pod) {
	t.Helper()
	r.apiserver.Add(p)
}

func somewhere(t *testing.T) *meshv1.Cluster {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	return &meshv1.Cluster{
		Version: "1", ServiceAddresses: []string{"198.18.0.1:443"}, EndpointAddresses: []string{"198.18.0.2:6443"},
		AdditionalAddresses: []string{"198.18.0.3:443"},
		Ca:                  pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
	}
}

// A pod that was made before the mesh cannot verify the proxy: captured, it could
// not talk to the apiserver any more.
func TestUnadmittedPodIsNotCaptured(t *testing.T) {
	r := start(t, 0)
	r.create(t, podObject("a", ""))
	r.soon(t, "the report", func() bool { return r.reported("a") != nil })

	require.NoError(t, r.do(t.Context(), func() error { r.capturer.captureMissing(); return nil }))
	r.soon(t, "the reason", func() bool { return r.pods["a"].problem != "" })
	r.in(t, func() {
		assert.Contains(t, r.pods["a"].problem, "delete it, so that its controller creates another")
	})
}

func TestStaticPodIsNotCaptured(t *testing.T) {
	r := start(t, 0)
	p := podObject("a", v1alpha1.TrustMesh)
	p.Annotations[corev1.MirrorPodAnnotationKey] = "d41d8cd98f00b204e9800998ecf8427e"
	r.create(t, p)
	r.soon(t, "the reason", func() bool { return r.pods["a"] != nil && r.pods["a"].problem != "" })
	r.in(t, func() { assert.Contains(t, r.pods["a"].problem, "DaemonSet") })
}

// A pod that cannot be captured is looked at forty times a second, and reported once.
func TestProblemIsLoggedOnce(t *testing.T) {
	r := start(t, 0)
	dir := filepath.Join(r.cgroups, "kubepods/poda")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("7\n"), 0o600))
	require.NoError(t, os.MkdirAll(filepath.Join(r.proc, "7/ns"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(r.proc, "7/ns/net"), nil, 0o600)) // another than the node's
	require.NoError(t, os.WriteFile(filepath.Join(r.proc, "7/cgroup"), []byte("0::/kubepods/poda\n"), 0o600))
	require.NoError(t, os.Symlink("/proc/self/stat", filepath.Join(r.proc, "7/stat")))
	require.NoError(t, r.SetCluster(somewhere(t)))
	r.create(t, podObject("a", v1alpha1.TrustMesh))
	r.soon(t, "the problem", func() bool { return r.pods["a"] != nil && r.pods["a"].problem != "" })

	require.NoError(t, r.do(t.Context(), func() error {
		for range 3 {
			r.capturer.captureMissing()
		}
		assert.Equal(t, 1, strings.Count(r.log.String(), "failed to capture a pod"))
		assert.Equal(t, "not here", r.pods["a"].problem)
		return nil
	}))
}

// One pod on its way out must not keep the whole node from knowing the apiserver.
func TestFailedRedirectionIsRetried(t *testing.T) {
	r := start(t, 1)
	assert.Error(t, r.SetCluster(somewhere(t)), "the manager gets the error")
	assert.Error(t, r.Ready())

	r.soon(t, "the redirection", func() bool { return r.destinations.redirected })
	r.in(t, func() {
		assert.Equal(t, []netip.AddrPort{netip.MustParseAddrPort("198.18.0.1:443"), netip.MustParseAddrPort("198.18.0.2:6443"), netip.MustParseAddrPort("198.18.0.3:443")}, r.backend.destinations)
	})
	saved, _, err := r.Store.Load()
	require.NoError(t, err)
	assert.Equal(t, "1", saved.GetVersion(), "kept for the next agent")
}

func TestInvalidAddressesChangeNothing(t *testing.T) {
	r := start(t, 0)
	good := somewhere(t)
	require.NoError(t, r.SetCluster(good))
	for _, bad := range []*meshv1.Cluster{
		{Ca: good.Ca},
		{Ca: good.Ca, ServiceAddresses: []string{"kubernetes.default.svc:443"}},
		{ServiceAddresses: good.ServiceAddresses},
		{Ca: good.Ca, ServiceAddresses: good.ServiceAddresses, AdditionalAddresses: []string{"api.example.com:443"}},
	} {
		assert.Error(t, r.SetCluster(bad))
	}
	r.soon(t, "the old addresses", func() bool { return r.destinations.cluster == good })
}

// The manager may hear of a pod first, and may be wrong about one that never comes.
func TestPolicyMayArriveBeforeItsPod(t *testing.T) {
	r := start(t, 0)
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "1"})
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "never", Version: "1"})
	r.create(t, podObject("a", v1alpha1.TrustMesh))
	r.soon(t, "the pod", func() bool { return r.pods["a"].info.Name == "pod-a" })
	assert.Equal(t, map[string]string{"a": "1", "never": "1"}, r.Versions())

	r.Synced(map[string]bool{"a": true})

	assert.Equal(t, map[string]string{"a": "1"}, r.Versions())
}

func TestDeletedPodIsForgotten(t *testing.T) {
	r := start(t, 0)
	p := podObject("a", v1alpha1.TrustMesh)
	r.create(t, p)
	r.soon(t, "the pod", func() bool { return r.pods["a"] != nil })
	r.apiserver.Delete(p)

	r.soon(t, "its end", func() bool { return r.pods["a"] == nil })

	r.in(t, func() {
		assert.Equal(t, []string{"a"}, r.gone)
		assert.False(t, r.backend.swept("a"), "what an earlier agent left of it goes, too")
	})
}
