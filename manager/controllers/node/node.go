// Package node publishes the abilities of nodes, as their agents report them.
package node

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// Controller publishes the abilities of nodes.
type Controller struct {
	Client client.Client
	// Namespace of the mesh.
	Namespace string
	Push      *push.Server
	State     *controllers.State

	since time.Time // of the first run
}

// Spec implements controllers.Reconciler.
func (c *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "nodes", Reconcile: c.Reconcile, Debounce: time.Second, Resync: 15 * time.Second,
		On: []controllers.Source{&c.State.Changed.Agents},
	}
}

// Reconcile writes the ConfigMap that admission reads on all replicas, and metrics.
func (c *Controller) Reconcile(ctx context.Context) error {
	if c.since.IsZero() {
		c.since = time.Now()
	}
	captures := c.Push.Captures()
	for _, mode := range []string{v1alpha1.CaptureEBPF, v1alpha1.CaptureIPTables, v1alpha1.CaptureAddress} {
		metrics.Nodes.WithLabelValues(mode).Set(float64(captures[mode]))
	}
	able, not := c.Push.HostNetwork()
	metrics.HostNetworkNodes.Set(float64(able))
	if able == 0 && time.Since(c.since) < status.Grace {
		return nil // the last leader's result applies until agents had time to connect
	}
	return inject.WriteConfigMap(ctx, c.Client, c.Namespace, inject.HostNetworkConfigMap, inject.HostNetwork(able > 0, not))
}
