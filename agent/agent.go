package agent

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/certs"
	"github.com/ctrlmesh/ctrlmesh/agent/control"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/nri"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// Options are what an agent must be told. Directories are as this process sees them.
type Options struct {
	// Node is the name of this node.
	Node string
	// Namespace is the mesh's own, where the manager publishes its CA.
	Namespace string
	// ManagerAddress is host:port of the manager's Service.
	ManagerAddress string
	// TokenFile holds a service-account token with the audience ctrlmesh-manager.
	TokenFile string
	// StateDir keeps the last policies over restarts and reboots.
	StateDir string
	// RunDir keeps the serving certificate over restarts, and the socket by which
	// one agent takes over from another; it should be in memory.
	RunDir string
	// PodDir is kept over restarts of this container, by its pod alone; it must be
	// in memory. If empty, each start is that of another pod.
	PodDir string
	// CgroupDir is the node's /sys/fs/cgroup.
	CgroupDir string
	// BPFDir is the node's BPF file system, usually /sys/fs/bpf.
	BPFDir string
	// Capture is ebpf, iptables, address, or empty for the best that works.
	Capture capture.Mode
	// AddressListen is where the pods that know their agent by address find it;
	// empty for nowhere.
	AddressListen string
	// NRISocket is the container runtime's.
	NRISocket string
	// ListenAddress serves /healthz, /readyz and /metrics.
	ListenAddress string
	// Version of this program.
	Version string
	Client  kubernetes.Interface
	Logger  *slog.Logger
}

// PinDir is where the redirection is pinned below a BPF file system.
func PinDir(bpfDir string) string { return filepath.Join(bpfDir, "ctrlmesh") }

// socket is where the agent that serves answers its successor. Agents of other versions
// use the same path.
func (o Options) socket() string { return filepath.Join(o.RunDir, "handover", "agent.sock") }

// openNode opens what an agent, or its cleanup, needs of the node: the unified
// cgroup hierarchy, and where pods are found in it.
func (o Options) openNode() (unified string, locator *pods.Locator, err error) {
	if unified, err = pods.FindUnified(o.CgroupDir); err != nil {
		return
	}
	locator, err = pods.NewLocator(unified, "/proc")
	return
}

// Run is the agent until ctx ends and what is under way has come to its end.
func Run(told context.Context, o Options) error {
	// An agent that is told to end lives on for its successor and its pods.
	ctx, end := context.WithCancel(context.WithoutCancel(told))
	defer end()
	unified, locator, err := o.openNode()
	if err != nil {
		return err
	}
	store, err := state.Open(filepath.Join(o.StateDir, "policies"))
	if err != nil {
		return err
	}
	podStart, err := takeover.PodStart(o.PodDir)
	if err != nil {
		return err
	}
	if !takeover.AwaitAdmission(told, o.socket(), podStart, o.Logger) {
		return nil
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	metrics := telemetry.NewMetrics(registry)
	backend, err := capture.Open(o.capturing(unified, metrics))
	if err != nil {
		return fmt.Errorf("no way to capture pods on this node: %w", err)
	}

	manager := &control.Manager{
		Address: o.ManagerAddress, ServerName: hostOf(o.ManagerAddress),
		Roots: managerRoots(o.Client, o.Namespace), TokenFile: o.TokenFile,
		Node: o.Node, Version: o.Version, Logger: o.Logger,
		HostNetwork: backend.HostNetwork(),
	}
	for _, mode := range backend.Modes() {
		manager.Captures = append(manager.Captures, string(mode))
	}
	telemetry.RegisterConnected(registry, manager.InStep)
	keeper, err := certs.NewKeeper(o.RunDir, manager.SignLeaf, o.Logger)
	if err != nil {
		return err
	}
	hosts, err := certs.NewHosts(manager.SignEgressLeaf)
	if err != nil {
		return err
	}
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: o.Client.EventsV1()})
	defer broadcaster.Shutdown()
	if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		return fmt.Errorf("recording Events: %w", err)
	}
	recorder := telemetry.NewRecorder(broadcaster.NewRecorder(scheme.Scheme, "ctrlmesh-agent"), o.Node)
	server, err := proxy.New(proxy.Config{
		Leaf: keeper.Current, Logger: o.Logger, Registerer: registry, Node: o.Node,
		EgressLeaf: func() func(context.Context, string) (*tls.Certificate, error) { return hosts.Pod().Get },
		Notify: func(p proxy.PodInfo, reason, message string) {
			recorder.Pod(pods.Pod{UID: p.UID, Namespace: p.Namespace, Name: p.Name}, reason, message)
		},
	})
	if err != nil {
		return fmt.Errorf("starting the proxy: %w", err)
	}

	writes := o.openJournal(recorder)
	m := &mesh{
		logger: o.Logger, locator: locator, capture: backend, proxy: server, store: store,
		report: manager.Report, forget: manager.Forget, renew: keeper.Renew, events: recorder,
		metrics: metrics, work: make(chan func()), podsPing: make(chan struct{}, 1), started: time.Now(),
		yielded: make(chan struct{}), drained: make(chan struct{}),
		members: map[string]*member{}, earlier: earlier{}, ended: map[string]string{}, podStart: podStart, journal: writes,
	}
	m.enter(serving)
	for mode, why := range backend.Unavailable() {
		recorder.Node("CaptureUnavailable", fmt.Sprintf("pods cannot be captured by %s on this node: %v", mode, why))
	}
	group, ctx := errgroup.WithContext(ctx)

	// The runtime first: between two agents, no pod starts that neither hears of.
	hearing := make(chan struct{})
	group.Go(func() error {
		nri.Run(until(ctx, m.yielded), o.NRISocket, sandboxes{m}, o.Logger, func() { close(hearing) })
		return nil
	})
	select {
	case <-hearing:
	case <-time.After(hearWithin):
	}
	// What can fail, fails before the agent that serves is asked to hand over.
	if m.watcher, err = pods.Watch(ctx, o.Client, o.Node, m.podsChanged); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", o.ListenAddress)
	if err != nil {
		return fmt.Errorf("listening for health and metrics: %w", err)
	}
	socket, err := m.takeOver(ctx, o.socket())
	if err != nil {
		return errors.Join(err, writes.Retire()) // nothing was let through
	}
	o.Logger.Info("agent started", "node", o.Node, "captures", manager.Captures, "version", o.Version)
	group.Go(func() error { m.run(ctx); return nil })
	group.Go(func() error { m.watchHealth(until(ctx, m.yielded), socket); return nil })
	group.Go(func() error { socket.Serve(ctx, holder{m}); return nil })
	context.AfterFunc(until(ctx, m.yielded), func() { _ = socket.Close() })
	// No change of a policy may miss a request under way.
	group.Go(func() error { manager.Run(until(ctx, m.drained), handler{ctx, m}); return nil })
	group.Go(func() error { keeper.Run(until(ctx, m.drained)); return nil })
	group.Go(func() error { return m.watchSuccessor(until(ctx, told.Done()), o.socket()) })
	group.Go(func() error {
		select {
		case <-told.Done():
			m.linger()
			end()
		case <-ctx.Done():
		}
		return nil
	})
	ready := func() error {
		if err := m.ready(); err != nil {
			return err
		}
		_, err := keeper.Current()
		return err
	}
	group.Go(func() error {
		return telemetry.Serve(ctx, listener, telemetry.Handler(m.healthy, ready, registry), metrics.RefusedEndpoint)
	})
	return group.Wait()
}

// openJournal opens the journal of this agent. One that cannot make a file serves all
// the same: it knows of its own writes, and only the next agent waits for all pods.
func (o Options) openJournal(r *telemetry.Recorder) *journal.Journal {
	dir := filepath.Join(o.RunDir, "journal")
	j, err := journal.Create(dir)
	if err != nil {
		o.Logger.Error("failed to create the journal: after this agent, handovers wait for all pods of the node", "error", err)
		r.Node("JournalUnavailable", fmt.Sprintf("after the next restart of the agent, handovers wait for all pods of this node: %v", err))
		return journal.InMemory(dir)
	}
	return j
}

func (o Options) capturing(unified string, m *telemetry.Metrics) capture.Config {
	return capture.Config{
		Mode: o.Capture, Address: o.AddressListen, PinDir: PinDir(o.BPFDir), Logger: o.Logger,
		// The node's own view of the hierarchy, which on nodes that are containers
		// is a part of the machine's. NewLocator saw that pods are below it.
		CgroupRoot: unified,
		// Anybody in the cluster can connect there: one line of each is too many.
		Refused: func(peer netip.Addr, why capture.Refusal) {
			m.RefusedCapture(why)
			o.Logger.Debug("a connection was closed", "peer", peer, "reason", string(why))
		},
	}
}

// hearWithin is how long the start waits for the container runtime.
const hearWithin = 2 * time.Second

// until ends with ctx, or when done is closed.
func until(ctx context.Context, done <-chan struct{}) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		select {
		case <-done:
		case <-ctx.Done():
		}
	}()
	return ctx
}

// takeOver takes the pods over from the agent that serves, or from what one left.
// It returns the socket by which the next agent will. After an error the agent
// before this one goes on.
func (m *mesh) takeOver(ctx context.Context, path string) (_ *takeover.Socket, err error) {
	socket, err := takeover.Listen(path, m.logger)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = socket.Close()
		}
	}()
	start := time.Now()
	offer, err := takeover.Ask(ctx, path, m.podStart)
	if errors.Is(err, takeover.ErrRefused) {
		return nil, err
	}
	if err != nil {
		m.logger.Error("starting as after a crash", "reason", err)
	}
	m.lastSocket, m.socket = takeover.At(path), socket.ID()
	if offer == nil {
		// First the socket: an agent that only hangs must find it before it touches
		// what this one makes.
		if err := socket.Take(); err != nil {
			return nil, err
		}
		m.restore(nil, nil)
		return socket, nil
	}
	m.restore(offer.Pods, offer.Drained)
	if err := m.tookOver(offer.Pods); err != nil {
		offer.Close()
		return nil, fmt.Errorf("taking over: the agent before this one goes on: %w", err)
	}
	traffic, err := offer.Serving()
	if err != nil {
		m.logger.Error("the agent before this one will find out by itself", "reason", err)
	}
	m.recount(traffic)
	m.logger.Info("took over", "pods", len(offer.Pods), "duration", time.Since(start))
	return socket, socket.Take()
}

// tookOver says what is missing of what was offered.
func (m *mesh) tookOver(offered []takeover.Pod) error {
	if (m.cluster != nil || len(offered) > 0) && !m.redirected {
		return errors.New("the apiserver's addresses are not redirected")
	}
	missing := map[string]bool{}
	for _, p := range offered {
		if m.members[p.UID].captured == nil {
			missing[p.UID] = true
		}
	}
	found, err := m.locator.Find(missing)
	if err != nil {
		return err
	}
	for uid := range missing {
		if mb := m.members[uid]; len(found[uid].PIDs) > 0 { // else it waits for one
			return fmt.Errorf("pod %s was captured, and is not now: %s", mb.pod, mb.problem)
		}
	}
	return nil
}

// managerRoots reads the CA of the manager's certificate where the manager
// publishes it.
func managerRoots(client kubernetes.Interface, namespace string) func(context.Context) (*x509.CertPool, error) {
	const name, key = meshv1.ManagerCAConfigMap, meshv1.ManagerCAKey
	return func(ctx context.Context) (*x509.CertPool, error) {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		cm, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM([]byte(cm.Data[key])) {
			return nil, fmt.Errorf("ConfigMap %s/%s has no certificate at %s", namespace, name, key)
		}
		return pool, nil
	}
}

func hostOf(address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	return host
}
