package main

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// clear deletes the operator, its locks, shards and objects, so that those of an earlier run
// are not counted again. Namespaces stay, because their deletion takes long. The operator is
// deleted first, while it is still sharded, and the locks after the shards, because the mesh
// keeps them until then.
func (d *demo) clear(ctx context.Context) error {
	return kube.InOrder(ctx, d.clearOperator, d.clearShards, d.clearLocks, d.clearObjects)
}

func (d *demo) clearOperator(ctx context.Context) error {
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: operator, Name: workload}}
	if err := d.Delete(ctx, set); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("deleting the operator: %w", err)
	}
	return kube.Until(ctx, "the operator to be deleted", func(ctx context.Context) error {
		var pods corev1.PodList
		return kube.Empty(&pods, d.List(ctx, &pods, client.InNamespace(operator), client.MatchingLabels{"app": workload}))
	})
}

func (d *demo) clearLocks(ctx context.Context) error {
	return failure.Wrap(d.DeleteAllOf(ctx, &coordinationv1.Lease{}, client.InNamespace(operator)), "deleting locks")
}

func (d *demo) clearShards(ctx context.Context) error {
	err := d.DeleteAllOf(ctx, &meshv1alpha1.ShardingConfig{}, client.InNamespace(operator), ours)
	if meta.IsNoMatchError(err) && !d.sharded {
		return nil // ctrlmesh is not installed
	}
	if err != nil {
		return fmt.Errorf("deleting ShardingConfigs: %w", err)
	}
	return kube.Until(ctx, "the ShardingConfigs to be deleted", func(ctx context.Context) error {
		var configs meshv1alpha1.ShardingConfigList
		return kube.Empty(&configs, d.List(ctx, &configs, client.InNamespace(operator), ours))
	})
}

func (d *demo) clearObjects(ctx context.Context) error {
	var namespaces corev1.NamespaceList
	if err := d.List(ctx, &namespaces, ours); err != nil {
		return fmt.Errorf("listing namespaces: %w", err)
	}
	for _, ns := range namespaces.Items {
		if err := d.DeleteAllOf(ctx, &tallyv1.Tally{}, client.InNamespace(ns.Name)); err != nil {
			return fmt.Errorf("deleting the objects in %s: %w", ns.Name, err)
		}
	}
	return kube.Until(ctx, "the objects to be deleted", func(ctx context.Context) error {
		tallies, err := d.tallies(ctx)
		return kube.Empty(&tallyv1.TallyList{Items: tallies}, err)
	})
}
