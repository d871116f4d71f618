// Tally is an operator for the tests: an ordinary controller-runtime program, with
// leader election and a kind of its own, that writes onto each object who
// reconciled it. It knows nothing of a mesh, and that is the point of it.
package main

import (
	"flag"
	"fmt"
	"log/slog"
	"os"

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
		slog.Error("the operator ended", "error", err)
		os.Exit(1)
	}
}

func run() error {
	var (
		pod     = flag.String("pod", os.Getenv("POD_NAME"), "name to record, this pod's")
		elect   = flag.Bool("leader-elect", true, "work only while holding the lock")
		lock    = flag.String("lock", "tally-leader", "name of the Lease to hold")
		home    = flag.String("lock-namespace", "", "namespace of the Lease; empty for this pod's")
		metrics = flag.String("metrics-bind-address", ":8080", "where to serve metrics; 0 for nowhere")
		probes  = flag.String("health-probe-bind-address", ":8081", "where to answer probes; 0 for nowhere")
		workers = flag.Int("workers", 4, "objects to reconcile at a time")
		refresh = flag.Duration("refresh", 0, "how often to write onto each object that it is looked after; 0 for never")
		selects = flag.String("selector", "", "labels of the objects to look after; empty for all")
		wait    = flag.Duration("wait", 0, "how long to wait before writing what is new, as operators do that ask somebody outside of the cluster")
	)
	flag.Parse()
	if *pod == "" {
		return fmt.Errorf("-pod is empty and so is POD_NAME")
	}

	logger := slog.New(slog.NewJSONHandler(os.Stdout, nil)).With("pod", *pod)
	slog.SetDefault(logger)
	ctrl.SetLogger(logr.FromSlogHandler(logger.Handler()))
	klog.SetSlogLogger(logger)

	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1.AddToScheme} {
		if err := add(scheme); err != nil {
			return fmt.Errorf("building the scheme: %w", err)
		}
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return fmt.Errorf("finding the apiserver: %w", err)
	}
	selector, err := labels.Parse(*selects)
	if err != nil {
		return fmt.Errorf("-selector: %w", err)
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Cache:                         cache.Options{DefaultLabelSelector: selector},
		Scheme:                        scheme,
		LeaderElection:                *elect,
		LeaderElectionID:              *lock,
		LeaderElectionNamespace:       *home,
		LeaderElectionReleaseOnCancel: true, // main returns right after Start does
		Metrics:                       metricsserver.Options{BindAddress: *metrics},
		HealthProbeBindAddress:        *probes,
	})
	if err != nil {
		return fmt.Errorf("making the manager: %w", err)
	}
	if err := mgr.AddReadyzCheck("ping", healthz.Ping); err != nil {
		return fmt.Errorf("adding the readiness check: %w", err)
	}
	queued := newBacklog(mgr.GetClient(), *pod)
	if err := mgr.Add(queued); err != nil {
		return fmt.Errorf("adding the report of the backlog: %w", err)
	}
	err = ctrl.NewControllerManagedBy(mgr).
		For(&v1.Tally{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: *workers}).
		Complete(&reconciler{Client: mgr.GetClient(), live: mgr.GetAPIReader(), pod: *pod, refresh: *refresh, wait: *wait, began: queued.began})
	if err != nil {
		return fmt.Errorf("making the controller: %w", err)
	}
	return mgr.Start(ctrl.SetupSignalHandler())
}
