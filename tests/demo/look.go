package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// look reads the cluster and the logs.
func (d *demo) look(ctx context.Context, at played) (*world, error) {
	w, err := d.world(ctx)
	if err != nil {
		return nil, err
	}
	of := audit.Callers{Users: []string{audit.ServiceAccount(operator, workload)}, Since: at.sharded}
	if w.traffic, err = d.Traffic(ctx, of); err != nil {
		return nil, err
	}
	of.Since = at.began
	w.requests, err = d.Requests(of)
	return w, err
}

// world reads the cluster's objects.
func (d *demo) world(ctx context.Context) (*world, error) {
	var (
		configs meshv1alpha1.ShardingConfigList
		pods    corev1.PodList
		leases  coordinationv1.LeaseList
	)
	for _, l := range []struct {
		list client.ObjectList
		opts []client.ListOption
	}{
		{&configs, []client.ListOption{client.InNamespace(operator)}},
		{&pods, []client.ListOption{client.InNamespace(operator), client.MatchingLabels{"app": workload}}},
		{&leases, []client.ListOption{client.InNamespace(operator)}},
	} {
		if err := d.List(ctx, l.list, l.opts...); err != nil && (d.sharded || !meta.IsNoMatchError(err)) {
			return nil, fmt.Errorf("reading the operator: %w", err)
		}
	}
	tallies, err := d.tallies(ctx)
	if err != nil {
		return nil, err
	}
	w := &world{now: time.Now(), pods: pods.Items, leases: leases.Items, tallies: tallies}
	for _, c := range configs.Items {
		switch {
		case c.Name == workload:
			w.root = c
		case c.Labels[meshv1alpha1.RootLabel] == workload:
			w.shards = append(w.shards, c)
		}
	}
	return w, nil
}

// tallies returns the objects in the demo's namespaces.
func (d *demo) tallies(ctx context.Context) ([]tallyv1.Tally, error) {
	var namespaces corev1.NamespaceList
	if err := d.List(ctx, &namespaces, ours); err != nil {
		return nil, fmt.Errorf("listing namespaces: %w", err)
	}
	mine := map[string]bool{}
	for _, ns := range namespaces.Items {
		mine[ns.Name] = true
	}
	var all tallyv1.TallyList
	if err := d.List(ctx, &all); err != nil {
		return nil, fmt.Errorf("listing objects: %w", err)
	}
	return slices.DeleteFunc(all.Items, func(t tallyv1.Tally) bool { return !mine[t.Namespace] }), nil
}
