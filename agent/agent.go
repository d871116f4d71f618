package agent

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/inbound"
	"github.com/ctrlmesh/ctrlmesh/agent/certs"
	"github.com/ctrlmesh/ctrlmesh/agent/control"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/kube"
	"github.com/ctrlmesh/ctrlmesh/agent/node"
	"github.com/ctrlmesh/ctrlmesh/agent/nri"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/internal/processors"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

const (
	// runtimeWait is how long the start waits for the container runtime.
	runtimeWait = 2 * time.Second
	// startedAfter is when the pods of a node are captured, and their clients have connected anew.
	startedAfter = 10 * time.Second
)

// Run runs the agent until stop ends and nothing is in flight any more.
func Run(stop context.Context, o Options) error {
	// After the signal to stop, the agent goes on serving its successor and its pods.
	ctx, end := context.WithCancel(context.WithoutCancel(stop))
	defer end()
	podStart, err := takeover.PodStart(o.PodDir)
	if err != nil {
		return err
	}
	if !takeover.AwaitPermission(stop, o.socket(), podStart, o.Logger) {
		return nil
	}
	a := &agent{Options: o, podStart: podStart, registry: prometheus.NewRegistry()}
	events := o.Client.Events(o.Logger)
	go events.Run(ctx)
	a.events = telemetry.NewRecorder(events.Write, o.Node)
	if err := a.open(); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	if err := a.serve(ctx, stop, group); err != nil {
		return err
	}
	group.Go(func() error {
		select {
		case <-stop.Done():
			a.node.AwaitDrained()
			end()
		case <-ctx.Done():
		}
		return nil
	})
	return group.Wait()
}

// agent is the parts of an agent.
type agent struct {
	Options
	podStart time.Duration
	registry *prometheus.Registry
	events   *telemetry.Recorder
	metrics  *telemetry.Metrics
	capture  capture.Backend
	manager  *control.Manager
	keeper   *certs.Keeper
	journal  *journal.Journal
	node     *node.Node
}

// open makes the parts. It changes nothing that another agent serves.
func (a *agent) open() error {
	unified, locator, err := a.findPods()
	if err != nil {
		return err
	}
	store, err := state.Open(filepath.Join(a.StateDir, "policies"))
	if err != nil {
		return err
	}
	a.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	a.metrics = telemetry.NewMetrics(a.registry)
	var inboundNode *inbound.Node
	cfg := a.captureConfig(unified, a.metrics)
	cfg.Lapsed = func() {
		a.Logger.Info("no agent of this node gave a sign of life for two seconds: connections that were made meanwhile may be direct, and are ended")
		if inboundNode != nil {
			inboundNode.NoteLapse()
		}
	}
	if a.capture, err = capture.Open(cfg); err != nil {
		return fmt.Errorf("no way to capture pods on this node: %w", err)
	}
	inboundNode, noInbound := inbound.Open(PinDir(a.BPFDir), a.Logger)
	if noInbound != nil {
		a.Logger.Warn("reviews cannot be routed on this node", "reason", noInbound)
	}
	for mode, why := range a.capture.Unavailable() {
		a.events.Node("CaptureUnavailable", fmt.Sprintf("pods cannot be captured by %s on this node: %v", mode, why))
	}
	a.manager = a.connection()
	telemetry.RegisterConnected(a.registry, a.manager.InStep)
	if a.keeper, err = certs.NewKeeper(a.RunDir, a.manager.SignLeaf, a.Logger); err != nil {
		return err
	}
	server, err := a.newProxy()
	if err != nil {
		return err
	}
	a.journal = node.OpenJournal(filepath.Join(a.RunDir, "journal"), a.events, a.Logger)
	a.node = node.New(node.Config{
		Locator: locator, Capture: a.capture, Inbound: inboundNode, NoInbound: noInbound, Proxy: server, Store: store, Journal: a.journal,
		Manager: a.manager, RenewLeaf: a.keeper.Renew, Events: a.events, Metrics: a.metrics,
		PodStart: a.podStart, Logger: a.Logger,
	})
	return nil
}

// connection returns the connection to the manager, which is not open yet.
func (a *agent) connection() *control.Manager {
	host, _, err := net.SplitHostPort(a.ManagerAddress)
	if err != nil {
		host = a.ManagerAddress
	}
	c := control.Config{
		Address: a.ManagerAddress, ServerName: host,
		Roots: managerRoots(a.Client, a.Namespace), TokenFile: a.TokenFile,
		Node: a.Node, Version: a.Version, Logger: a.Logger,
		HostNetwork: a.capture.HostNetwork(),
		Captures:    collect.Map(a.capture.Modes(), func(m capture.Mode) string { return string(m) }),
	}
	return control.New(c)
}

func (a *agent) newProxy() (*proxy.Server, error) {
	hosts, err := certs.NewHosts(a.manager.SignEgressLeaf)
	if err != nil {
		return nil, err
	}
	server, err := proxy.New(proxy.Config{
		Leaf: a.keeper.Current, Logger: a.Logger, Registerer: a.registry, Node: a.Node, WatchMemory: a.WatchMemory,
		EgressLeaf: func() func(context.Context, string) (*tls.Certificate, error) { return hosts.Pod().Get },
		Notify: func(p proxy.PodInfo, reason, message string) {
			a.events.Pod(pods.Pod{UID: p.UID, Namespace: p.Namespace, Name: p.Name}, reason, message)
		},
	})
	return server, failure.Wrap(err, "starting the proxy")
}

// serve takes the pods over, then starts all parts in group. After an error, an agent that
// served before goes on.
func (a *agent) serve(ctx, stop context.Context, group *errgroup.Group) error {
	serving, draining := until(ctx, a.node.Yielded()), until(ctx, a.node.Drained())
	// The runtime first: every pod that starts is announced to one of two agents.
	a.listenToRuntime(serving, group)
	// All that can fail, fails before the takeover.
	if err := a.node.Watch(ctx, a.Client.Pods(a.Node)); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", a.ListenAddress)
	if err != nil {
		return fmt.Errorf("listening for health and metrics: %w", err)
	}
	socket, err := a.node.TakeOver(ctx, a.socket())
	if err != nil {
		return errors.Join(err, a.journal.Retire()) // nothing was let through
	}
	a.Logger.Info("agent started", "node", a.Node, "captures", a.manager.Captures, "version", a.Version)
	context.AfterFunc(serving, func() { _ = socket.Close() })
	for _, part := range []func(){
		func() { a.node.Run(ctx) },
		func() { a.node.WatchHealth(serving, socket) },
		func() { socket.Serve(ctx, a.node.Incumbent()) },
		// Requests in flight must not miss a change of their policy.
		func() { a.manager.Run(draining, a.node.Policies(ctx)) },
		func() { a.keeper.Run(draining) },
		func() { processors.Adapt(ctx) },
		func() { returnMemory(ctx) },
	} {
		group.Go(func() error { part(); return nil })
	}
	group.Go(func() error { return a.node.WatchSuccessor(until(ctx, stop.Done()), a.socket()) })
	group.Go(func() error {
		return telemetry.Serve(ctx, listener, telemetry.Handler(a.node.Healthy, a.ready, a.registry), a.metrics.RefusedEndpoint)
	})
	return nil
}

// returnMemory returns what only the start needed to the node: at rest, an agent allocates so little
// that the next collection may be minutes away.
func returnMemory(ctx context.Context) {
	select {
	case <-time.After(startedAfter):
		debug.FreeOSMemory()
	case <-ctx.Done():
	}
}

// listenToRuntime returns when the container runtime was reached, or has not been in time.
func (a *agent) listenToRuntime(ctx context.Context, group *errgroup.Group) {
	tried := make(chan struct{})
	group.Go(func() error {
		nri.Run(ctx, a.NRISocket, a.node.Sandboxes(), a.Logger, func() { close(tried) })
		return nil
	})
	select {
	case <-tried:
	case <-time.After(runtimeWait):
	}
}

// ready returns why the agent cannot serve yet.
func (a *agent) ready() error {
	if err := a.node.Ready(); err != nil {
		return err
	}
	_, err := a.keeper.Current()
	return err
}

// until returns a context that ends with ctx, or when done is closed.
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

// managerRoots returns a function that reads the CA of the manager's certificate from
// where the manager publishes it.
func managerRoots(client *kube.Client, namespace string) func(context.Context) (*x509.CertPool, error) {
	const name, key = meshv1.ManagerCAConfigMap, meshv1.ManagerCAKey
	return func(ctx context.Context) (*x509.CertPool, error) {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		cm, err := client.ConfigMap(ctx, namespace, name)
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
