// Tally is an operator for the tests: an ordinary controller-runtime program with leader
// election and its own kind, which records in each object the pods that reconciled it. It does
// not use the mesh, on purpose.
package main

import (
	"flag"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	v1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

func main() {
	if err := run(); err != nil {
		slog.Error("operator failed", "error", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	pod, lock, home, metrics, probes, selector string
	elect                                      bool
	workers                                    int
	refresh, wait                              time.Duration
}

func parseOptions() (options, error) {
	var o options
	flag.StringVar(&o.pod, "pod", os.Getenv("POD_NAME"), "name to record, this pod's")
	flag.BoolVar(&o.elect, "leader-elect", true, "work only while holding the lock")
	flag.StringVar(&o.lock, "lock", "tally-leader", "name of the Lease to acquire")
	flag.StringVar(&o.home, "lock-namespace", "", "namespace of the Lease; empty for this pod's")
	flag.StringVar(&o.metrics, "metrics-bind-address", ":8080", "where to serve metrics; 0 for nowhere")
	flag.StringVar(&o.probes, "health-probe-bind-address", ":8081", "where to answer probes; 0 for nowhere")
	flag.IntVar(&o.workers, "workers", 4, "objects to reconcile at a time")
	flag.DurationVar(&o.refresh, "refresh", 0, "how often to write the status of each object; 0 for changes only")
	flag.StringVar(&o.selector, "selector", "", "labels of the objects to reconcile; empty for all")
	flag.DurationVar(&o.wait, "wait", 0, "how long to wait before each write, as operators do that call an external service")
	flag.Parse()
	if o.pod == "" {
		return o, fmt.Errorf("-pod is empty and so is POD_NAME")
	}
	return o, nil
}

func run() error {
	o, err := parseOptions()
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewJSONHandler(os.Stdout, nil)).With("pod", o.pod)
	slog.SetDefault(logger)
	ctrl.SetLogger(logr.FromSlogHandler(logger.Handler()))
	klog.SetSlogLogger(logger)

	mgr, err := newManager(o)
	if err != nil {
		return err
	}
	queued := newBacklog(mgr.GetClient(), o.pod)
	if err := mgr.Add(queued); err != nil {
		return fmt.Errorf("adding the report of the backlog: %w", err)
	}
	err = ctrl.NewControllerManagedBy(mgr).
		For(&v1.Tally{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: o.workers}).
		Complete(&reconciler{Client: mgr.GetClient(), live: mgr.GetAPIReader(), pod: o.pod, refresh: o.refresh, wait: o.wait, began: queued.began})
	if err != nil {
		return fmt.Errorf("making the controller: %w", err)
	}
	return mgr.Start(ctrl.SetupSignalHandler())
}

// newManager returns a manager that answers readiness probes and has no controllers yet.
func newManager(o options) (ctrl.Manager, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("building the scheme: %w", err)
		}
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the apiserver: %w", err)
	}
	selector, err := labels.Parse(o.selector)
	if err != nil {
		return nil, fmt.Errorf("-selector: %w", err)
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Cache:                         cache.Options{DefaultLabelSelector: selector},
		Scheme:                        scheme,
		LeaderElection:                o.elect,
		LeaderElectionID:              o.lock,
		LeaderElectionNamespace:       o.home,
		LeaderElectionReleaseOnCancel: true, // main returns right after Start does
		Metrics:                       metricsserver.Options{BindAddress: o.metrics},
		HealthProbeBindAddress:        o.probes,
	})
	if err != nil {
		return nil, fmt.Errorf("making the manager: %w", err)
	}
	if err := mgr.AddReadyzCheck("ping", healthz.Ping); err != nil {
		return nil, fmt.Errorf("adding the readiness check: %w", err)
	}
	return mgr, nil
}
