// Package root hands keys over between the shards of roots.
package root

import (
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
)

// Controller runs the rounds of package roots.
type Controller struct {
	Cache client.Reader
	Roots *roots.Roots
	Push  *push.Server
	State *controllers.State

	next time.Time // of a correction's steps
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "roots", Reconcile: r.Reconcile, Debounce: controllers.DebounceAcks, Resync: 10 * time.Second,
		Next: func() time.Time { return r.next },
		On:   []controllers.Source{&r.State.Listed, r.State.Compiled.When(otherwiseEnacted), &r.State.Entries, &r.State.ForbiddenLocks, &r.State.MissingBundles, &r.State.Changed.Agents, &r.State.Changed.Weights, &r.State.Changed.Answers},
	}
}

// otherwiseEnacted reports whether shards act by other specs.
func otherwiseEnacted(before, after *controllers.Compiled) bool {
	return before == nil || !before.Enacted.Same(after.Enacted)
}

// Reconcile does what can be done now for each root.
func (r *Controller) Reconcile(ctx context.Context) error {
	l := r.State.Listed.Load()
	if l == nil {
		return nil
	}
	// Read after what was listed, so that it is no older. Before the first pods have
	// no policies, so that nothing follows from what agents say of them.
	in := roots.Input{Configs: l.Configs, Pods: l.Pods, Namespaces: l.Namespaces, Enacted: l.Enacted, Unknown: l.Unknown, Unresolved: l.Resolved.Errors, RequestTimeout: r.State.RequestTimeout(), Node: func(name string) bool {
		return !apierrors.IsNotFound(r.Cache.Get(ctx, types.NamespacedName{Name: name}, controllers.MetadataOf(controllers.NodeKind)))
	}}
	if forbidden := r.State.ForbiddenLocks.Load(); forbidden != nil {
		in.ForbiddenLocks = *forbidden
	}
	if c := r.State.Compiled.Load(); c != nil {
		in.Compiled, in.CompiledBy, in.Removed = c.Result, c.Enacted, r.Push.Removed()
	}
	if r.Roots.Young() && slices.ContainsFunc(l.Configs, func(c *v1alpha1.ShardingConfig) bool { return c.Spec.Root != nil }) {
		var err error
		if in.Unconnected, err = r.unconnected(ctx); err != nil {
			return err
		}
	}
	err := r.Roots.Round(ctx, in)
	r.next = time.Time{}
	if r.Roots.Correcting() {
		r.next = time.Now().Add(roots.CorrectEvery)
	}
	return err
}

// unconnected lists the Nodes of which no agent has connected to this manager.
func (r *Controller) unconnected(ctx context.Context) ([]string, error) {
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(controllers.NodeKind)
	if err := r.Cache.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing Nodes: %w", err)
	}
	return r.Push.Unconnected(collect.Map(nodes.Items, func(n metav1.PartialObjectMetadata) string { return n.Name })), nil
}
