// Reviewer is an operator for the tests that consists of webhooks: an ordinary
// controller-runtime program with leader election and its own kind, which it mutates, validates
// and converts. Two versions of it mark objects differently. It does not use the mesh, on purpose.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	v1 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v1"
	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

func main() {
	if err := run(ctrl.SetupSignalHandler()); err != nil {
		slog.Error("operator failed", "error", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	by                            v2.Reviewer
	lock, probes, certDir, signal string
	port                          int
}

func parseOptions() (options, error) {
	var o options
	flag.StringVar(&o.by.Version, "version", "", "version of the operator, which it writes into objects")
	flag.StringVar(&o.by.Pod, "pod", os.Getenv("POD_NAME"), "name to write into objects, this pod's")
	flag.StringVar(&o.lock, "lock", "reviewer-leader", "name of the Lease to acquire")
	flag.StringVar(&o.probes, "health-probe-bind-address", ":8081", "where to answer probes; 0 for nowhere")
	flag.StringVar(&o.certDir, "cert-dir", "", "directory with tls.crt and tls.key")
	flag.IntVar(&o.port, "port", webhook.DefaultPort, "port of the webhooks")
	flag.StringVar(&o.signal, "serve-after", "", "a file to wait for before anything is served, as operators do that wait for their certificate; empty: none")
	flag.Parse()
	if o.by.Version == "" || o.by.Pod == "" {
		return o, errors.New("-version or -pod is empty")
	}
	return o, nil
}

func run(ctx context.Context) error {
	o, err := parseOptions()
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewJSONHandler(os.Stdout, nil)).With("pod", o.by.Pod)
	slog.SetDefault(logger)
	ctrl.SetLogger(logr.FromSlogHandler(logger.Handler()))
	klog.SetSlogLogger(logger)

	mgr, err := newManager(o)
	if err != nil {
		return err
	}
	err = ctrl.NewWebhookManagedBy(mgr, &v2.Paper{}).WithDefaulter(reviewer{o.by}).WithValidator(reviewer{o.by}).Complete()
	if err != nil {
		return fmt.Errorf("adding the webhooks: %w", err)
	}
	if err := await(ctx, o.signal); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1.AddToScheme, v2.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("building the scheme: %w", err)
		}
	}
	return scheme, nil
}

// newManager returns a manager that is ready once its webhooks are served.
func newManager(o options) (ctrl.Manager, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the apiserver: %w", err)
	}
	server := webhook.NewServer(webhook.Options{Port: o.port, CertDir: o.certDir})
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:                        scheme,
		LeaderElection:                true,
		LeaderElectionID:              o.lock,
		LeaderElectionReleaseOnCancel: true, // main returns right after Start does
		Metrics:                       metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress:        o.probes,
		WebhookServer:                 server,
	})
	if err != nil {
		return nil, fmt.Errorf("making the manager: %w", err)
	}
	if err := mgr.AddReadyzCheck("webhooks", server.StartedChecker()); err != nil {
		return nil, fmt.Errorf("adding the readiness check: %w", err)
	}
	return mgr, nil
}

// await waits until a file exists. It returns at once if the name is empty.
func await(ctx context.Context, name string) error {
	for name != "" {
		_, err := os.Stat(name)
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil
}
