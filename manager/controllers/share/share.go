// Package share splits rules of scope Workload among the pods of each workload.
package share

import (
	"context"
	"time"

	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// Controller decides the shares in State.Allocator.
type Controller struct {
	Push  *push.Server
	State *controllers.State
}

// Spec implements controllers.Reconciler. The reports of all agents trigger the controller,
// and policies wait for it, so it rests.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "shares", Reconcile: r.Reconcile, Debounce: controllers.DebounceAcks, Resync: 10 * time.Second, Rests: true,
		On: []controllers.Source{&r.State.Compiled, &r.State.Changed.Agents, &r.State.Changed.Recorded},
	}
}

// Reconcile splits rules anew as members are created, deleted, and confirm.
func (r *Controller) Reconcile(context.Context) error {
	r.State.Sharing.Lock()
	defer r.State.Sharing.Unlock()
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	publish, record := r.State.Allocator.Round(c.Policies, func(p compile.Policy) bool {
		o := r.Push.Observe(p.Node, p.Uid)
		return o.Version == p.Version && o.TrafficMessage == ""
	})
	if publish {
		r.State.Changed.Shares.Notify()
	}
	if record {
		r.State.Changed.Unrecorded.Notify()
	}
	return nil
}
