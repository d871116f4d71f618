package main

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// reconciler records its pod in every object that it reconciles.
type reconciler struct {
	client.Client
	live    client.Reader // bypasses the cache
	pod     string
	refresh time.Duration // 0 for never
	wait    time.Duration // wait before recording a generation
	began   func(types.NamespacedName)
}

// Reconcile implements reconcile.Reconciler.
func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	r.began(req.NamespacedName)
	tally := &v1.Tally{}
	if err := r.Get(ctx, req.NamespacedName, tally); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if r.wait > 0 && tally.Status.Generations[r.pod] < tally.Generation {
		select {
		case <-ctx.Done():
			return ctrl.Result{}, ctx.Err()
		case <-time.After(r.wait):
		}
	}
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if !r.record(tally) {
			return nil
		}
		err := r.Status().Update(ctx, tally)
		if !apierrors.IsConflict(err) {
			return err
		}
		// The cache may still have the version of the conflict.
		fresh := &v1.Tally{}
		if err := r.live.Get(ctx, req.NamespacedName, fresh); err != nil {
			return err
		}
		tally = fresh
		return err
	})
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("recording %s: %w", r.pod, err)
	}
	return ctrl.Result{RequeueAfter: r.refresh}, nil
}

// record updates the status, and reports whether it changed.
func (r *reconciler) record(tally *v1.Tally) bool {
	recorded := tally.Record(r.pod)
	return r.refresh > 0 && tally.Refresh(time.Now(), r.refresh) || recorded
}
