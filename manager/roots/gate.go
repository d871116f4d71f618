package roots

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

const (
	// outsideEvery is how often pods outside the mesh are listed while the first grant waits
	// for them, and outsideRarely while shards of an operator without a lock act.
	outsideEvery  = 2 * time.Second
	outsideRarely = 30 * time.Second
	// entrySettles is how long apiservers may take to follow a new webhook entry.
	entrySettles = 5 * time.Second
	// maxOutside bounds the pods outside the mesh that are named, outsidePage those that are
	// read at once.
	maxOutside  = 5
	outsidePage = 250
)

// gate delays the first grant of a root while a pod outside the mesh may act: while it holds
// a lock of the operator, or, for an operator without locks, while it exists.
type gate struct {
	// locks are the operator's locks, as they are to be written.
	locks []v1alpha1.LockStatus
	// undiscovered is why a lock that members showed is not among them; nil if none.
	undiscovered *locks.Obstacle
	// outside are the pods of the workload outside the mesh at the time listed; unlisted is
	// why they are not known.
	outside  []string
	listed   time.Time
	unlisted error
	// bySelector reports whether pods are put on the mesh by a selector, without a label.
	bySelector bool
	// otherLocks reports whether pods outside the mesh may lead under other locks: behind
	// Kridge, those of its shards.
	otherLocks bool
	// closed is why the gate is closed; nil while it is open.
	closed *locks.Obstacle
	// acquirable reports whether only the locks keep the gate closed, so that the mesh may
	// acquire them.
	acquirable bool
	demand     locks.Demand
}

// Demands returns the demands of roots for locks. It is not ok before the first round.
func (r *Roots) Demands() (demands []locks.Demand, ok bool) {
	known := r.demands.Load()
	return ptr.Deref(known, nil), known != nil
}

// publishDemands publishes the demands of a round. The locks of roots that could not be
// read stay as they are.
func (r *Roots) publishDemands() {
	out := make([]locks.Demand, 0, len(r.roots))
	for _, rt := range r.roots {
		if rt.object == nil || rt.broken != nil {
			rt.demand.Mode = locks.Watch
		}
		out = append(out, rt.demand)
	}
	slices.SortFunc(out, func(a, b locks.Demand) int { return strings.Compare(a.Config.String(), b.Config.String()) })
	if before := r.demands.Swap(&out); before == nil || !reflect.DeepEqual(*before, out) {
		r.Asked()
	}
}

// survey updates the operator's locks, their holders and, where they matter, the pods of the
// workload outside the mesh.
func (rt *root) survey(ctx context.Context, v view, now time.Time) {
	before := rt.object.Status.Locks
	rt.locks, rt.undiscovered = locks.Survey(v.config, before, locks.Sightings(v.pods, v.observe), v.world.Configs, rt.Locks)
	discovered := func(l v1alpha1.LockStatus) bool { return l.Discovered }
	named := slices.DeleteFunc(slices.Clone(rt.locks), discovered)
	if unheld := locks.Unheld(named, rt.lockState, v.holder); unheld != nil && len(before) == 0 && rt.state.Holds() {
		// An earlier version left members with locks that the mesh did not hold: they
		// keep them until it does.
		rt.locks = nil
	}
	rt.bySelector, rt.otherLocks = origin.KindOf(v.config) == origin.VirtualApp, origin.KindOf(v.config) == origin.Kridge
	if every, matter := rt.outsideMatters(v, now); matter && now.Sub(rt.listed) >= every {
		if rt.outside, rt.unlisted = findOutside(ctx, rt.Client, v.config); rt.unlisted == nil {
			rt.listed = now
		}
	}
}

// outsideMatters reports whether pods outside the mesh matter, and how often to list them.
func (rt *root) outsideMatters(v view, now time.Time) (every time.Duration, matter bool) {
	switch {
	case compile.Withdrawn(v.config) || v.config.Spec.DryRun:
		return 0, false
	case rt.bySelector && !rt.state.Holds():
		admitted := rt.admitted(v.config) // until then more of them may be created
		return outsideEvery, !admitted.IsZero() && !now.Before(admitted)
	case rt.state.Holds():
		return outsideRarely, rt.bySelector || len(rt.locks) == 0 && len(compile.NamedLocks(v.config)) == 0
	}
	return outsideEvery, rt.otherLocks || len(rt.locks) == 0 || !rt.held() && len(v.uncovered(rt.state.Members)) > 0
}

// admitted returns from when no pod of a VirtualApp can be created outside the mesh; the zero
// time if some can.
func (rt *root) admitted(config *v1alpha1.ShardingConfig) time.Time {
	if since := rt.Entry(config).Since; !since.IsZero() {
		return since.Add(entrySettles)
	}
	return time.Time{}
}

// unadmitted returns the obstacle that pods of a VirtualApp may run outside the mesh: they are
// older than its webhook entry. nil if there are none.
func (rt *root) unadmitted(config *v1alpha1.ShardingConfig) *locks.Obstacle {
	if rt.Entry(config).Full {
		return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: "the webhooks of older VirtualApps leave no room for the one that would put its pods on the mesh: delete VirtualApps, or shorten their selectors"}
	}
	if admitted := rt.admitted(config); admitted.IsZero() || rt.listed.Before(admitted) {
		return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: "the webhook that puts new pods on the mesh is being written"}
	}
	return rt.outsideActs("")
}

// lockState returns what is known of a lock of the root.
func (rt *root) lockState(lock types.NamespacedName) (locks.State, bool) {
	return rt.Locks.States(client.ObjectKeyFromObject(rt.object))(lock)
}

// held reports whether the mesh holds all locks.
func (g *gate) held() bool {
	return !slices.ContainsFunc(g.locks, func(l v1alpha1.LockStatus) bool { return !l.HeldByMesh })
}

// locksHeld reports whether no pod outside the mesh can act, as far as is known.
func (rt *root) locksHeld(v view) bool {
	if len(rt.locks) > 0 {
		return rt.unacquired() == nil
	}
	return len(compile.NamedLocks(v.config)) == 0 && !rt.listed.IsZero() && rt.outsideActs("") == nil
}

// unacquired returns the first obstacle among the operator's locks: one that the mesh does
// not hold, or that is only in its name, as in a restored backup.
func (rt *root) unacquired() *locks.Obstacle {
	for _, l := range rt.locks {
		name := types.NamespacedName{Namespace: l.Namespace, Name: l.Name}
		if s, _ := rt.lockState(name); !s.Acquired || s.Renewed.Before(rt.readAt) {
			return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: fmt.Sprintf("lock %s is in the mesh's name, but this manager has not acquired it: a pod outside the mesh may still lead if etcd was restored", name)}
		}
	}
	return nil
}

// mayGrant reports whether the first grant may begin: no pod outside the mesh can act from
// now on.
func (rt *root) mayGrant(v view) bool {
	if rt.closed = v.undivided(rt.state); rt.closed != nil {
		return false
	}
	if rt.bySelector {
		if rt.closed = rt.unadmitted(v.config); rt.closed != nil {
			return false
		}
	}
	switch {
	case len(rt.locks) == 0:
		rt.closed = rt.outsideActs("")
		return rt.closed == nil
	case rt.held():
		rt.acquirable, rt.closed = true, rt.unacquired()
		if rt.closed == nil && rt.otherLocks {
			rt.closed = rt.outsideActs("")
		}
		return rt.closed == nil
	}
	rt.closed = locks.Unheld(rt.locks, rt.lockState, v.holder)
	rt.closed.Message += "; members are in standby until the mesh holds it"
	// While some shard would have no working pod, one outside the mesh may lead again.
	if uncovered := v.uncovered(rt.state.Members); len(uncovered) > 0 {
		acts := rt.outsideActs(fmt.Sprintf(", and shard %s has no ready pod in standby", strings.Join(uncovered, ", ")))
		if acts != nil && rt.closed.Reason != v1alpha1.ReasonHeldOutside {
			rt.closed = acts
		}
		rt.acquirable = acts == nil
		return false
	}
	rt.acquirable = true
	return false
}

// outsideActs returns the obstacle that pods outside the mesh may act; nil if there are none.
func (g *gate) outsideActs(more string) *locks.Obstacle {
	switch {
	case g.unlisted != nil:
		return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: fmt.Sprintf("whether pods run outside the mesh is not known: %v", g.unlisted)}
	case len(g.outside) > 0:
		remedy := fmt.Sprintf("set label %s: \"true\" on the pod template, so that they are replaced", v1alpha1.EnableProxyLabel)
		if g.bySelector {
			remedy = "they were created before the VirtualApp: restart them"
		}
		return &locks.Obstacle{Reason: v1alpha1.ReasonOutsidePods,
			Message: fmt.Sprintf("pods of the workload run outside the mesh: %s%s; %s", strings.Join(g.outside, ", "), more, remedy)}
	}
	return nil
}

// findOutside lists the pods of the workload that do not have the label of the mesh. The
// manager does not watch those.
func findOutside(ctx context.Context, c client.Reader, config *v1alpha1.ShardingConfig) (out []string, err error) {
	unlabelled, err := labels.NewRequirement(v1alpha1.EnableProxyLabel, selection.NotEquals, []string{"true"})
	if err != nil {
		return nil, err
	}
	selector := labels.NewSelector().Add(*unlabelled)
	if s := config.Spec.Root.TargetSelector; s != nil {
		target, err := metav1.LabelSelectorAsSelector(s)
		if err != nil {
			return nil, fmt.Errorf("reading the selector: %w", err)
		}
		more, _ := target.Requirements()
		selector = selector.Add(more...)
	}
	for next := ""; ; {
		var page corev1.PodList
		if err := c.List(ctx, &page, client.InNamespace(config.Namespace), client.MatchingLabelsSelector{Selector: selector}, client.Limit(outsidePage), client.Continue(next)); err != nil {
			return nil, fmt.Errorf("listing pods: %w", err)
		}
		for i := range page.Items {
			pod := &page.Items[i]
			if !layout.Selects(config.Spec.Root, pod) || compile.Ended(pod) {
				continue
			}
			if len(out) == maxOutside {
				return append(out, "and more"), nil
			}
			out = append(out, pod.Name)
		}
		if next = page.Continue; next == "" {
			return out, nil
		}
	}
}

// setDemand sets the demand that follows from a state.
func (rt *root) setDemand(v view, state handover.State) {
	rt.demand = locks.Demand{Config: client.ObjectKeyFromObject(v.config), Mode: rt.mode(v, state)}
	rt.demand.Locks = collect.Map(compile.OperatorLocks(v.config, rt.locks), func(name types.NamespacedName) locks.Lock { return locks.LockOf(name, rt.locks) })
	for _, p := range v.pods {
		if account := cmp.Or(p.Spec.ServiceAccountName, "default"); !slices.Contains(rt.demand.Accounts, account) {
			rt.demand.Accounts = append(rt.demand.Accounts, account)
		}
	}
}

func (rt *root) mode(v view, state handover.State) locks.Mode {
	switch {
	case v.changes() && rt.state.Holds():
		return locks.Keep
	case v.config.Spec.DryRun && v.quiet(state.Members):
		return locks.Release // members contend for the locks as they are
	case state.Holds():
		return locks.Keep
	case !v.quiet(state.Members) || len(rt.unconfirmed) > 0:
		return locks.Watch // it is not known yet that no pod acts
	case rt.acquirable && !compile.Withdrawn(v.config) && v.problem == nil:
		return locks.Acquire
	}
	return locks.Release
}

// obstacle returns why shards do not act, or not as a whole; nil if they do.
func (rt *root) obstacle(v view, state handover.State, now time.Time) *locks.Obstacle {
	switch {
	case state.RolledBack:
		return &locks.Obstacle{Reason: v1alpha1.ReasonRolledBack,
			Message: "agents have had later policies than status.root accounts for, as after a restore of etcd; all members are in standby until each of them has confirmed that, then the root starts anew"}
	case state.Holds() && !state.Evidence.OthersConfirmed && now.Sub(rt.readAt) >= status.Grace:
		return rt.unverified(v, state)
	case compile.Withdrawn(v.config):
		return nil
	case v.undivided(state) != nil:
		return v.undivided(state)
	case v.changes():
		return v.changing(state)
	case v.config.Spec.DryRun:
		return nil
	case !state.Holds():
		return rt.closed
	case !state.Verified() && now.Sub(rt.readAt) >= status.Grace:
		return rt.unverified(v, state)
	}
	return rt.lockObstacle(v)
}

// lockObstacle returns why shards that own keys may lack a leader; nil if there is no reason.
func (rt *root) lockObstacle(v view) *locks.Obstacle {
	forbidden := v.world.ForbiddenLocks[v.config.UID]
	switch {
	case forbidden != "":
		return &locks.Obstacle{Reason: v1alpha1.ReasonLockForbidden, Message: forbidden}
	case rt.undiscovered != nil:
		return rt.undiscovered
	case len(rt.locks) == 0:
		return rt.outsideActs("")
	}
	if unheld := locks.Unheld(rt.locks, rt.lockState, v.holder); unheld != nil || !rt.bySelector {
		return unheld
	}
	return rt.outsideActs("")
}

// unverified returns the obstacle that agents have not confirmed, since the state was read,
// what their pods act on.
func (rt *root) unverified(v view, state handover.State) *locks.Obstacle {
	names := v.strangers(state.Members)
	if state.Evidence.OthersConfirmed {
		names = collect.Map(state.Unconfirmed(), func(m handover.Member) string { return fmt.Sprintf("pod %s on node %s", m.Name, m.Node) })
	}
	message := "no keys move until the agents have confirmed that pods without a shard act on nothing, because they may be in shards of which a restored backup does not know"
	if state.Evidence.OthersConfirmed {
		shards := collect.Filter(slices.Sorted(maps.Keys(state.Shards)), state.Pinned)
		message = "the agents have not confirmed all that status.root says, which may have been restored from a backup"
		if len(shards) > 0 {
			message += "; no keys move from or to shard " + firstOf(shards) + " until then"
		}
	}
	if len(names) > 0 {
		message += "; waiting for " + firstOf(names)
	}
	return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: message}
}

// firstOf lists the first maxOutside names.
func firstOf(names []string) string {
	if len(names) > maxOutside {
		names = append(names[:maxOutside], "and more")
	}
	return strings.Join(names, ", ")
}
