package agent

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/leaf"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/policy"
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
	// RunDir keeps the serving certificate over restarts; it should be in memory.
	RunDir string
	// CgroupDir is the node's /sys/fs/cgroup.
	CgroupDir string
	// BPFDir is the node's BPF file system, usually /sys/fs/bpf.
	BPFDir string
	// Capture is ebpf, iptables, or empty for the first of them that works.
	Capture capture.Mode
	// ListenAddress serves /healthz, /readyz and /metrics.
	ListenAddress string
	// Version of this program.
	Version string
	Client  kubernetes.Interface
	Logger  *slog.Logger
}

// PinDir is where the redirection is pinned below a BPF file system.
func PinDir(bpfDir string) string { return filepath.Join(bpfDir, "ctrlmesh") }

// openNode opens what an agent, or its cleanup, needs of the node: the unified
// cgroup hierarchy, where pods are found in it, and what was last told of them.
func (o Options) openNode() (unified string, locator *pods.Locator, store *policy.Store, err error) {
	if unified, err = pods.FindUnified(o.CgroupDir); err != nil {
		return
	}
	if locator, err = pods.NewLocator(unified, "/proc"); err != nil {
		return
	}
	store, err = policy.OpenStore(filepath.Join(o.StateDir, "policies"))
	return
}

// Run is the agent until ctx ends.
func Run(ctx context.Context, o Options) error {
	unified, locator, store, err := o.openNode()
	if err != nil {
		return err
	}
	method, err := capture.Open(capture.Config{
		Mode: o.Capture, CgroupRoot: unified, PinDir: PinDir(o.BPFDir), Logger: o.Logger,
		// The node's own view of the hierarchy, which on nodes that are containers
		// is a part of the machine's. NewLocator saw that pods are below it.
		Subtree: true,
	})
	if err != nil {
		return fmt.Errorf("no way to capture pods on this node: %w", err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	manager := &policy.Manager{
		Address: o.ManagerAddress, ServerName: hostOf(o.ManagerAddress),
		Roots: managerRoots(o.Client, o.Namespace), TokenFile: o.TokenFile,
		Node: o.Node, Version: o.Version, Logger: o.Logger,
	}
	keeper, err := leaf.NewKeeper(o.RunDir, manager.SignLeaf, o.Logger)
	if err != nil {
		return err
	}
	server, err := proxy.New(proxy.Config{Leaf: keeper.Current, Logger: o.Logger, Registerer: registry, Node: o.Node})
	if err != nil {
		return fmt.Errorf("starting the proxy: %w", err)
	}

	m := &mesh{
		logger: o.Logger, locator: locator, capture: method, proxy: server, store: store,
		report: manager.Report, forget: manager.Forget,
		renew:   keeper.Renew,
		metrics: newMetrics(registry), work: make(chan func()), podsPing: make(chan struct{}, 1), started: time.Now(),
		members: map[string]*member{},
	}
	m.restore()
	if m.watcher, err = pods.Watch(ctx, o.Client, o.Node, m.podsChanged); err != nil {
		return err
	}

	listener, err := net.Listen("tcp", o.ListenAddress)
	if err != nil {
		return fmt.Errorf("listening for health and metrics: %w", err)
	}
	httpServer := &http.Server{Handler: endpoints(m, keeper, registry), ReadHeaderTimeout: 5 * time.Second}

	o.Logger.Info("agent started", "node", o.Node, "capture", string(method.Modes()[0]), "version", o.Version)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { m.run(ctx); return nil })
	group.Go(func() error { manager.Run(ctx, handler{ctx, m}); return nil })
	group.Go(func() error { keeper.Run(ctx); return nil })
	group.Go(func() error {
		<-ctx.Done()
		return httpServer.Close()
	})
	group.Go(func() error {
		if err := httpServer.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serving health and metrics: %w", err)
		}
		return nil
	})
	return group.Wait()
}

// endpoints are what kubelet and Prometheus ask for.
func endpoints(m *mesh, keeper *leaf.Keeper, registry *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		// A loop that takes no work is not alive.
		ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
		defer cancel()
		if err := m.do(ctx, func() error { return nil }); err != nil {
			http.Error(w, "the agent's loop is stuck", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
		defer cancel()
		if err := m.do(ctx, m.ready); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		if _, err := keeper.Current(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return mux
}

// ready says what is missing before pods can be served.
func (m *mesh) ready() error {
	switch {
	case m.cluster == nil:
		return errors.New("waiting for the manager to name the apiserver's addresses")
	case !m.redirected:
		return errors.New("the apiserver's addresses are not redirected yet")
	case !m.watcher.Synced():
		return errors.New("waiting for the list of this node's pods")
	}
	return nil
}

// managerRoots reads the CA of the manager's certificate where the manager
// publishes it.
func managerRoots(client kubernetes.Interface, namespace string) func(context.Context) (*x509.CertPool, error) {
	const name, key = "ctrlmesh-manager-ca", "ca.crt"
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
