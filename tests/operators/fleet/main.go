// Fleet is an operator for the tests that manages several clusters through one apiserver: it follows
// the list of clusters, and reconciles ConfigMaps in each by informers of its own. It does not use
// the mesh.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/ctrlmesh/ctrlmesh/tests/operators/fleet/fleetv1"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		slog.Error("operator failed", "error", err)
		os.Exit(1)
	}
}

// run leads when it is elected, until the context ends or it loses the lock.
func run(ctx context.Context) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return fmt.Errorf("finding the apiserver: %w", err)
	}
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	config.UserAgent, config.QPS, config.Burst = name, 100, 100
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: os.Getenv("POD_NAMESPACE"), Name: fleetv1.Lock},
			Client:     client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: name},
		},
		LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second, ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				if err := newFleet(config, name).run(ctx); err != nil && ctx.Err() == nil {
					slog.Error("following the clusters failed", "error", err)
					cancel()
				}
			},
			OnStoppedLeading: cancel,
		},
	})
	if err != nil {
		return err
	}
	elector.Run(ctx)
	return nil
}
