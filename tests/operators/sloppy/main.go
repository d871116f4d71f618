// Sloppy is an operator for the tests that has bugs on purpose: for each claim, a ConfigMap
// with a label, it creates one child. Each bug, chosen by a flag, has no effect while the
// apiserver answers at once, correctly and completely. It does not use the mesh.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client/config"
)

func main() {
	if err := run(); err != nil {
		slog.Error("operator failed", "error", err)
		os.Exit(1)
	}
}

func run() error {
	namespace := flag.String("namespace", os.Getenv("POD_NAMESPACE"), "where the claims are")
	bug := flag.String("bug", "", "stale-read, lost-event or assumed-create; empty for none")
	flag.Parse()
	if *namespace == "" {
		return fmt.Errorf("-namespace is empty and so is POD_NAMESPACE")
	}
	rest, err := config.GetConfig()
	if err != nil {
		return fmt.Errorf("finding the apiserver: %w", err)
	}
	kube, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	o, err := newOperator(kube.CoreV1().ConfigMaps(*namespace), Bug(*bug))
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	for ctx.Err() == nil {
		if err := o.round(ctx); err != nil && ctx.Err() == nil {
			slog.Warn("a round failed", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	return nil
}

// roundFor is how long a watch runs before everything is listed again.
const roundFor = 10 * time.Second

// round lists all claims, and then watches changes for a while. With the bug LostEvent, it
// continues the watch at the last event instead of listing.
func (o *operator) round(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, roundFor)
	defer cancel()
	if o.version == "" || o.bug != LostEvent {
		list, err := o.maps.List(ctx, metav1.ListOptions{LabelSelector: ClaimLabel})
		if err != nil {
			return fmt.Errorf("listing claims: %w", err)
		}
		if err := o.resync(ctx, list.Items); err != nil {
			return err
		}
		o.version = list.ResourceVersion
	}
	w, err := o.maps.Watch(ctx, metav1.ListOptions{LabelSelector: ClaimLabel, ResourceVersion: o.version, AllowWatchBookmarks: true})
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		o.version = ""
	}
	if err != nil {
		return fmt.Errorf("watching claims: %w", err)
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		claim, ok := e.Object.(*corev1.ConfigMap)
		if !ok {
			o.version = ""
			return fmt.Errorf("watching claims: %w", apierrors.FromObject(e.Object))
		}
		o.version = claim.ResourceVersion
		if e.Type == watch.Bookmark {
			continue
		}
		if err := o.event(ctx, e.Type, claim); err != nil {
			return err
		}
	}
	return nil
}
