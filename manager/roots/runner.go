package roots

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// runner runs the rounds of one root, and keeps what this leader knows of it.
type runner struct {
	of  *Roots
	uid types.UID
	record
	memory  decide.Memory
	demand  locks.Demand
	lookups lookups
	metrics rootMetrics
	queries []query.Query // of the last decision
}

// round runs a round of one root. config may be outdated: state is read from the object
// that was last read or written here.
func (rt *runner) round(ctx context.Context, config *v1alpha1.ShardingConfig, w Input) (err error) {
	if rt.object == nil || rt.broken != nil {
		if err := rt.read(ctx, config); err != nil || rt.object == nil {
			return err
		}
	}
	if rt.broken != nil {
		return rt.broken
	}
	if config.DeletionTimestamp == nil && controllerutil.AddFinalizer(rt.object, v1alpha1.HandoverFinalizer) {
		if err := rt.finalizer(ctx); err != nil || rt.object == nil {
			return err
		}
	}
	if !w.Follows(rt.uid, rt.stored.Acting) {
		return nil // the policies that follow from what was read start a round
	}

	now := rt.of.Now()
	facts, err := rt.observe(ctx, config, w, now)
	if err != nil {
		return err
	}
	next, d := decide.Decide(rt.memory, facts, now)
	if err := rt.commit(ctx, next, d); err != nil || rt.object == nil {
		return err
	}
	return rt.act(ctx, w, facts, d, now)
}
