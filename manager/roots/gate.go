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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

const (
	// outsideEvery is how often pods outside the mesh are listed while they keep the
	// first keys from being given, and outsideRarely while shards of an operator
	// without a lock act.
	outsideEvery  = 2 * time.Second
	outsideRarely = 30 * time.Second
	// maxOutside bounds the pods outside the mesh that are read and named.
	maxOutside = 5
)

// gate keeps the first keys of a root from being given while a pod outside the mesh
// may act: while it holds a lock of the operator, or, for an operator without locks,
// while it exists.
type gate struct {
	// locks are the operator's, as they are to be written.
	locks []v1alpha1.LockStatus
	// undiscovered is why a lock that members showed is not among them; nil if none.
	undiscovered *locks.Obstacle
	// outside are the pods of the workload outside the mesh, listed at that time;
	// unlisted is why they are not known.
	outside  []string
	listed   time.Time
	unlisted error
	// closed is what keeps the gate closed; nil while it is open.
	closed *locks.Obstacle
	// ripe: nothing but the locks keeps the gate closed, so that they may be acquired.
	ripe   bool
	demand locks.Demand
}

// Demands are what roots ask of the keeper of locks. It is not ok before all roots were
// looked at.
func (r *Roots) Demands() (demands []locks.Demand, ok bool) {
	known := r.demands.Load()
	if known == nil {
		return nil, false
	}
	return *known, true
}

// publishDemands lets Demands know of a round. The locks of roots that could not be
// looked at stay as they are.
func (r *Roots) publishDemands() {
	out := make([]locks.Demand, 0, len(r.roots))
	for _, rt := range r.roots {
		if rt.object == nil || rt.broken != nil {
			rt.demand.Mode = locks.Watch
		}
		out = append(out, rt.demand)
	}
	slices.SortFunc(out, func(a, b locks.Demand) int { return strings.Compare(a.Config.String(), b.Config.String()) })
	if before := r.demands.Swap(&out); r.Asked != nil && (before == nil || !reflect.DeepEqual(*before, out)) {
		r.Asked()
	}
}

// survey finds out which locks the operator has, who holds them, and, where that
// matters, which pods of the workload are outside the mesh.
func (rt *root) survey(ctx context.Context, v view, now time.Time) {
	before := rt.object.Status.Locks
	rt.locks, rt.undiscovered = locks.Survey(v.config, before, rt.sightings(v), v.world.Configs, rt.Locks)
	discovered := func(l v1alpha1.LockStatus) bool { return l.Discovered }
	named := slices.DeleteFunc(slices.Clone(rt.locks), discovered)
	if unheld := locks.Unheld(named, rt.Locks, rt.holder(v)); unheld != nil && len(before) == 0 && rt.state.Holds() {
		// An earlier version left members with locks that the mesh did not hold: they
		// keep them until it does.
		rt.locks = nil
	}
	every := outsideEvery
	switch {
	case compile.Withdrawn(v.config) || v.config.Spec.DryRun:
		return
	case rt.state.Holds() && (len(rt.locks) > 0 || len(compile.NamedLocks(v.config)) > 0):
		return
	case rt.state.Holds():
		every = outsideRarely
	case len(rt.locks) > 0 && (rt.held() || len(rt.uncovered(v)) == 0):
		return
	}
	if now.Sub(rt.listed) >= every {
		if rt.outside, rt.unlisted = rt.findOutside(ctx, v.config); rt.unlisted == nil {
			rt.listed = now
		}
	}
}

func (rt *root) sightings(v view) (out []locks.Sighting) {
	for _, p := range v.pods {
		for _, l := range rt.Observe(p.Spec.NodeName, string(p.UID)).ObservedLocks {
			out = append(out, locks.Sighting{Pod: p, ObservedLock: l})
		}
	}
	return out
}

// held reports whether the mesh holds all locks.
func (rt *root) held() bool {
	return !slices.ContainsFunc(rt.locks, func(l v1alpha1.LockStatus) bool { return !l.HeldByMesh })
}

// locksHeld reports whether no pod outside the mesh can act, as far as is known.
func (rt *root) locksHeld(v view) bool {
	if len(rt.locks) > 0 {
		return rt.unacquired() == nil
	}
	return len(compile.NamedLocks(v.config)) == 0 && !rt.listed.IsZero() && rt.outsideActs("") == nil
}

// unacquired is the first obstacle among the operator's locks: one that the mesh does not
// hold, or that only bears its name, as in a restored backup.
func (rt *root) unacquired() *locks.Obstacle {
	for _, l := range rt.locks {
		name := types.NamespacedName{Namespace: l.Namespace, Name: l.Name}
		if s, _ := rt.Locks(name); !s.Acquired || s.Renewed.Before(rt.readAt) {
			return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: fmt.Sprintf("lock %s is in the mesh's name, but this manager has not acquired it: a pod outside the mesh may still lead if etcd was restored", name)}
		}
	}
	return nil
}

// mayGrant reports whether the first keys may be given: no pod outside the mesh can act
// from now on.
func (rt *root) mayGrant(v view) bool {
	switch {
	case len(rt.locks) == 0:
		rt.closed = rt.outsideActs("")
		return rt.closed == nil
	case rt.held():
		rt.ripe, rt.closed = true, rt.unacquired()
		return rt.closed == nil
	}
	rt.closed = locks.Unheld(rt.locks, rt.Locks, rt.holder(v))
	rt.closed.Message += "; members are in standby until the mesh holds it"
	// While some shard would have no working pod, one outside the mesh may lead again.
	if uncovered := rt.uncovered(v); len(uncovered) > 0 {
		acts := rt.outsideActs(fmt.Sprintf(", and shard %s has no ready pod in standby", strings.Join(uncovered, ", ")))
		if acts != nil && rt.closed.Reason != v1alpha1.ReasonHeldOutside {
			rt.closed = acts
		}
		rt.ripe = acts == nil
		return false
	}
	rt.ripe = true
	return false
}

// holder describes an identity: clients commonly make it of their pod's name, "_" and
// a random text.
func (rt *root) holder(v view) func(string) string {
	_, workload := layout.Target(v.config.Spec.Root)
	return func(identity string) string {
		if pod, _, _ := strings.Cut(identity, "_"); strings.HasPrefix(pod, workload+"-") {
			return fmt.Sprintf("%q (pod %s)", identity, pod)
		}
		return fmt.Sprintf("%q", identity)
	}
}

// uncovered are the shards without a ready pod that could take their keys.
func (rt *root) uncovered(v view) []string {
	placed, _ := layout.Place(v.config.Spec.Root, v.pods, rt.state.Members)
	covered := map[string]bool{}
	for _, p := range v.pods {
		uid := string(p.UID)
		if rt.refuses(v, p) && admitted(v, p) && status.PodReady(p) && rt.Observe(p.Spec.NodeName, uid).Capture != "" {
			covered[cmp.Or(rt.state.Members[uid].Shard, placed[uid])] = true
		}
	}
	var out []string
	for _, s := range layout.Shards(v.config.Spec.Root) {
		if !covered[s.Name] {
			out = append(out, s.Name)
		}
	}
	return out
}

// admitted reports whether a pod was admitted as the configuration asks: one whose
// clients can verify the real apiserver is no exclusive member.
func admitted(v view, p *corev1.Pod) bool {
	return p.Annotations[v1alpha1.TrustAnnotation] != "" && (compile.Exclusive(p) || compile.Trust(v.config) == v1alpha1.TrustBoth)
}

// outsideActs is the obstacle that pods outside the mesh are; nil if there are none.
func (rt *root) outsideActs(more string) *locks.Obstacle {
	switch {
	case rt.unlisted != nil:
		return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: fmt.Sprintf("whether pods run outside the mesh is not known: %v", rt.unlisted)}
	case len(rt.outside) > 0:
		return &locks.Obstacle{Reason: v1alpha1.ReasonOutsidePods,
			Message: fmt.Sprintf("pods of the workload run outside the mesh: %s%s; set label %s: \"true\" on the pod template, so that they are replaced", strings.Join(rt.outside, ", "), more, v1alpha1.EnableProxyLabel)}
	}
	return nil
}

// findOutside lists the pods of the workload that do not have the label of the mesh. The
// manager does not watch those.
func (rt *root) findOutside(ctx context.Context, config *v1alpha1.ShardingConfig) ([]string, error) {
	unlabelled, err := labels.NewRequirement(v1alpha1.EnableProxyLabel, selection.NotEquals, []string{"true"})
	if err != nil {
		return nil, err
	}
	var pods metav1.PartialObjectMetadataList
	pods.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	if err := rt.Client.List(ctx, &pods, client.InNamespace(config.Namespace), client.MatchingLabelsSelector{Selector: labels.NewSelector().Add(*unlabelled)}); err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	var out []string
	for _, m := range pods.Items {
		if !layout.Selects(config.Spec.Root, &m) {
			continue
		}
		pod := &corev1.Pod{}
		err := rt.Client.Get(ctx, client.ObjectKeyFromObject(&m), pod)
		if apierrors.IsNotFound(err) || err == nil && compile.Ended(pod) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading pod %s: %w", m.Name, err)
		}
		if len(out) == maxOutside {
			return append(out, "and more"), nil
		}
		out = append(out, m.Name)
	}
	return out, nil
}

// ask makes the demand that follows from a state.
func (rt *root) ask(v view, state handover.State) {
	rt.demand = locks.Demand{Config: client.ObjectKeyFromObject(v.config), Mode: rt.mode(v, state)}
	for _, name := range compile.OperatorLocks(v.config, rt.locks) {
		l := locks.Lock{NamespacedName: name}
		for _, s := range rt.locks {
			if s.Namespace == name.Namespace && s.Name == name.Name {
				l.Resources = s.Resources
			}
		}
		rt.demand.Locks = append(rt.demand.Locks, l)
	}
	for _, p := range v.pods {
		if account := cmp.Or(p.Spec.ServiceAccountName, "default"); !slices.Contains(rt.demand.Accounts, account) {
			rt.demand.Accounts = append(rt.demand.Accounts, account)
		}
	}
}

func (rt *root) mode(v view, state handover.State) locks.Mode {
	switch {
	case v.config.Spec.DryRun && rt.quiet(v, state):
		return locks.Release // members contend for the locks as they are
	case state.Holds():
		return locks.Keep
	case !rt.quiet(v, state) || len(rt.unsure) > 0:
		return locks.Watch // it is not known yet that no pod acts
	case rt.ripe && !compile.Withdrawn(v.config) && v.problem == nil:
		return locks.Acquire
	}
	return locks.Release
}

// quiet reports whether no member leads any more under its shard's locks, as far as its
// agent has confirmed.
func (rt *root) quiet(v view, state handover.State) bool {
	for uid, m := range state.Members {
		policy := v.world.Compiled.Policies[types.UID(uid)]
		if !standsBy(policy.PodPolicy) && !policy.GetSharding().GetDryRun() || rt.Observe(m.Node, uid).Version != policy.Version {
			return false
		}
	}
	return true
}

// unreleased reports whether the mesh holds a lock that no other configuration has: no
// pod can lead that runs unsharded.
func (rt *root) unreleased(v view) bool {
	return slices.ContainsFunc(rt.locks, func(l v1alpha1.LockStatus) bool {
		return l.HeldByMesh && locks.Claimed(v.config, types.NamespacedName{Namespace: l.Namespace, Name: l.Name}, v.world.Configs) == ""
	})
}

// standsBy reports whether a pod acts on nothing under a policy.
func standsBy(p *meshv1.PodPolicy) bool { return p.GetRefuse() != "" || p.GetSharding().GetStandby() }

// obstacle is what keeps shards that act from acting as a whole; nil if nothing does.
func (rt *root) obstacle(v view, state handover.State, now time.Time) *locks.Obstacle {
	switch {
	case state.RolledBack:
		return &locks.Obstacle{Reason: v1alpha1.ReasonRolledBack,
			Message: "agents have had later policies than status.root accounts for, as after a restore of etcd; all members are in standby until each of them has confirmed that, then the root starts anew"}
	case state.Holds() && !state.Evidence.OthersHeard && now.Sub(rt.readAt) >= status.Grace:
		return rt.unverified(v, state)
	case compile.Withdrawn(v.config) || v.config.Spec.DryRun:
		return nil
	case !state.Holds():
		return rt.closed
	case !state.Verified() && now.Sub(rt.readAt) >= status.Grace:
		return rt.unverified(v, state)
	case rt.undiscovered != nil:
		return rt.undiscovered
	case len(rt.locks) == 0:
		return rt.outsideActs("")
	}
	return locks.Unheld(rt.locks, rt.Locks, rt.holder(v))
}

// unverified is the obstacle that pods are of which the agents have not confirmed, since the
// state was read, what they act on.
func (rt *root) unverified(v view, state handover.State) *locks.Obstacle {
	names := rt.others(v, state)
	if state.Evidence.OthersHeard {
		names = nil
		for _, m := range state.Unconfirmed() {
			names = append(names, fmt.Sprintf("pod %s on node %s", m.Name, m.Node))
		}
	}
	if len(names) > maxOutside {
		names = append(names[:maxOutside], "and more")
	}
	message := "no keys move until the agents have confirmed that pods without a shard act on nothing, because they may be in shards of which a restored backup does not know"
	if state.Evidence.OthersHeard {
		var shards []string
		for _, name := range slices.Sorted(maps.Keys(state.Shards)) {
			if state.Pinned(name) {
				shards = append(shards, name)
			}
		}
		if len(shards) > maxOutside {
			shards = append(shards[:maxOutside], "and more")
		}
		message = "the agents have not confirmed all that status.root says, which may have been restored from a backup"
		if len(shards) > 0 {
			message += "; no keys move from or to shard " + strings.Join(shards, ", ") + " until then"
		}
	}
	if len(names) > 0 {
		message += "; waiting for " + strings.Join(names, ", ")
	}
	return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: message}
}
