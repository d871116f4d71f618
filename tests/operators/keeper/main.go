// Keeper is an operator for the tests that has owners, and dependents of another kind: for each
// ConfigMap with a label it creates Secrets. It deletes them with their owner, which a finalizer
// keeps until then. Nothing else would: they have no owner references. So an owner that is gone
// before its dependents shows a decision by a part of the caches. It does not use the mesh.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	// OwnerLabel marks owners, and on a dependent names its owner.
	OwnerLabel = "keeper-owner"
	finalizer  = "ctrlmesh.test/keeper"
	dependents = 3 // of each owner
)

func main() {
	if err := run(); err != nil {
		slog.Error("operator failed", "error", err)
		os.Exit(1)
	}
}

func run() error {
	flag.Parse()
	ctrl.SetLogger(logr.FromSlogHandler(slog.NewTextHandler(os.Stdout, nil)))
	config, err := ctrl.GetConfig()
	if err != nil {
		return fmt.Errorf("finding the apiserver: %w", err)
	}
	labelled, err := labels.NewRequirement(OwnerLabel, selection.Exists, nil)
	if err != nil {
		return err
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Cache:   cache.Options{DefaultLabelSelector: labels.NewSelector().Add(*labelled)},
		Metrics: metricsserver.Options{BindAddress: "0"},
	})
	if err != nil {
		return fmt.Errorf("making the manager: %w", err)
	}
	err = ctrl.NewControllerManagedBy(mgr).
		For(&corev1.ConfigMap{}).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: o.GetLabels()[OwnerLabel]}}}
		})).
		Complete(&keeper{mgr.GetClient()})
	if err != nil {
		return fmt.Errorf("making the controller: %w", err)
	}
	return mgr.Start(ctrl.SetupSignalHandler())
}

type keeper struct{ client.Client }

func (k *keeper) Reconcile(ctx context.Context, r ctrl.Request) (ctrl.Result, error) {
	owner := &corev1.ConfigMap{}
	if err := k.Get(ctx, r.NamespacedName, owner); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if owner.DeletionTimestamp != nil {
		return ctrl.Result{}, k.finalize(ctx, owner)
	}
	if controllerutil.AddFinalizer(owner, finalizer) {
		if err := k.Update(ctx, owner); err != nil {
			return ctrl.Result{}, err
		}
	}
	for i := range dependents {
		s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
			Namespace: owner.Namespace, Name: fmt.Sprintf("%s-%d", owner.Name, i), Labels: map[string]string{OwnerLabel: owner.Name},
		}}
		if err := k.Create(ctx, s); err != nil && !apierrors.IsAlreadyExists(err) {
			return ctrl.Result{}, err
		}
	}
	return ctrl.Result{}, nil
}

// finalize deletes the dependents of an owner that are in the cache, or lets the owner go.
func (k *keeper) finalize(ctx context.Context, owner *corev1.ConfigMap) error {
	var left corev1.SecretList
	if err := k.List(ctx, &left, client.InNamespace(owner.Namespace), client.MatchingLabels{OwnerLabel: owner.Name}); err != nil {
		return err
	}
	for i := range left.Items {
		if err := k.Delete(ctx, &left.Items[i]); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	if len(left.Items) > 0 || !controllerutil.RemoveFinalizer(owner, finalizer) {
		return nil
	}
	return k.Update(ctx, owner)
}
