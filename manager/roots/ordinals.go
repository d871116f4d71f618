package roots

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// workload is what is known of the StatefulSet whose pods are assigned by ordinal.
type workload struct {
	// first is the first ordinal of its pods, as of the time looked.
	first  int
	looked time.Time
}

// ordinals returns the first ordinal of the pods of a StatefulSet, which it reads now and
// then; 0 for other workloads, and for one that does not exist.
func (rt *root) ordinals(ctx context.Context, config *v1alpha1.ShardingConfig, now time.Time) (first int, err error) {
	target := layout.Target(config.Spec.Root)
	if target.Kind != layout.StatefulSet || now.Sub(rt.looked) < outsideRarely {
		return rt.first, nil
	}
	set := &appsv1.StatefulSet{}
	err = rt.Client.Get(ctx, client.ObjectKey{Namespace: config.Namespace, Name: target.Name}, set)
	if client.IgnoreNotFound(err) != nil {
		if !rt.looked.IsZero() {
			return rt.first, nil // it rarely changes
		}
		return 0, fmt.Errorf("reading spec.ordinals of %s: %w", target, err)
	}
	rt.first, rt.looked = 0, now
	if set.Spec.Ordinals != nil {
		rt.first = int(set.Spec.Ordinals.Start)
	}
	return rt.first, nil
}
