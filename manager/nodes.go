package manager

import (
	"context"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// keepNodes tells what the nodes can: admission on all replicas, and metrics.
func (w *world) keepNodes(ctx context.Context) error {
	if w.leading.IsZero() {
		w.leading = time.Now()
	}
	captures := w.push.Captures()
	for _, c := range []string{v1alpha1.CaptureEBPF, v1alpha1.CaptureIPTables, v1alpha1.CaptureAddress} {
		metrics.Nodes.WithLabelValues(c).Set(float64(captures[c]))
	}
	able, not := w.push.HostNetwork()
	metrics.HostNetworkNodes.Set(float64(able))
	if able == 0 && time.Since(w.leading) < status.Grace {
		return nil // what the last leader wrote stands until agents had time to connect
	}
	return inject.KeepHostNetwork(ctx, w.live, w.Namespace, inject.HostNetwork(able > 0, not))
}
