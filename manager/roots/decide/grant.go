package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// gate delays the first grant of a root while a pod outside the mesh may act: while it holds
// a lock of the operator, or, for an operator without locks, while it exists.
type gate struct {
	// closed is why the gate is closed; nil while it is open.
	closed *locks.Obstacle
	// acquirable reports whether only the locks keep the gate closed, so that the mesh may
	// acquire them.
	acquirable bool
}

// mayGrant returns an open gate if the first grant may begin: no pod outside the mesh can act
// from now on.
func (v *view) mayGrant() gate {
	if closed := v.undivided(v.Stored.State); closed != nil {
		return gate{closed: closed}
	}
	if v.bySelector() {
		if closed := v.unadmitted(); closed != nil {
			return gate{closed: closed}
		}
	}
	switch {
	case len(v.locks) == 0:
		return gate{closed: v.outsideActs("")}
	case v.held():
		closed := v.unacquired()
		if closed == nil && v.otherLocks() {
			closed = v.outsideActs("")
		}
		return gate{closed, true}
	}
	closed := locks.Unheld(v.locks, v.lockState, v.holder)
	closed.Message += "; members are in standby until the mesh holds it"
	// While some shard would have no working pod, one outside the mesh may lead again.
	if uncovered := v.uncovered(v.Stored.State.Members); len(uncovered) > 0 {
		acts := v.outsideActs(fmt.Sprintf(", and shard %s has no ready pod in standby", strings.Join(uncovered, ", ")))
		if acts != nil && closed.Reason != v1alpha1.ReasonHeldOutside {
			closed = acts
		}
		return gate{closed, acts == nil}
	}
	return gate{closed, true}
}

// lockState returns what is known of a lock of the root.
func (v *view) lockState(lock types.NamespacedName) (s locks.State, ok bool) {
	s, ok = v.Locks.States[lock]
	return s, ok
}

// held reports whether the mesh holds all locks.
func (v *view) held() bool {
	return !slices.ContainsFunc(v.locks, func(l v1alpha1.LockStatus) bool { return !l.HeldByMesh })
}

// locksHeld reports whether no pod outside the mesh can act, as far as is known.
func (v *view) locksHeld() bool {
	if len(v.locks) > 0 {
		return v.unacquired() == nil
	}
	return len(compile.NamedLocks(v.Spec.Config)) == 0 && !v.Outside.Listed.IsZero() && v.outsideActs("") == nil
}

// unacquired returns the first obstacle among the operator's locks: one that the mesh does
// not hold, or that is only in its name, as in a restored backup.
func (v *view) unacquired() *locks.Obstacle {
	for _, l := range v.locks {
		name := types.NamespacedName{Namespace: l.Namespace, Name: l.Name}
		s, _ := v.lockState(name)
		if v.Locks.Asked == 0 || s.Asked < v.Locks.Asked {
			// It may be about to be released by an earlier demand.
			return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: fmt.Sprintf("the mesh is about to acquire lock %s, or to confirm that it keeps it", name)}
		}
		if !s.Acquired || s.Renewed.Before(v.Stored.ReadAt) {
			return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: fmt.Sprintf("lock %s is in the mesh's name, but this manager has not acquired it: a pod outside the mesh may still lead if etcd was restored", name)}
		}
	}
	return nil
}

// holder describes an identity: clients commonly make it of their pod's name, "_" and
// a random text.
func (v *view) holder(identity string) string {
	workload := layout.Target(v.Spec.Config.Spec.Root).Name
	if pod, _, _ := strings.Cut(identity, "_"); workload != "" && strings.HasPrefix(pod, workload+"-") {
		return fmt.Sprintf("%q (pod %s)", identity, pod)
	}
	return fmt.Sprintf("%q", identity)
}

// unreleased reports whether the mesh holds a lock that no other configuration has: no
// pod can lead that runs unsharded.
func (v *view) unreleased() bool {
	return slices.ContainsFunc(v.locks, func(l v1alpha1.LockStatus) bool {
		return l.HeldByMesh && !v.Locks.Claimed[types.NamespacedName{Namespace: l.Namespace, Name: l.Name}]
	})
}

// demand returns what the root demands of the operator's locks.
func (d *deciding) demand() locks.Demand {
	config := d.v.Spec.Config
	out := locks.Demand{Config: types.NamespacedName{Namespace: config.Namespace, Name: config.Name}, Mode: d.mode()}
	out.Locks = collect.Map(compile.OperatorLocks(config, d.v.locks), func(name types.NamespacedName) locks.Lock { return locks.LockOf(name, d.v.locks) })
	for _, p := range d.v.Pods.Workload {
		if account := compile.AccountOf(p); !slices.Contains(out.Accounts, account) {
			out.Accounts = append(out.Accounts, account)
		}
	}
	return out
}

func (d *deciding) mode() locks.Mode {
	v, state := d.v, d.next
	switch {
	case v.changes() && state.Holds():
		return locks.Keep
	case v.Spec.Config.Spec.DryRun && v.quiet(state.Members):
		return locks.Release // members contend for the locks as they are
	case state.Holds():
		return locks.Keep
	case !v.quiet(state.Members) || len(d.unconfirmed) > 0:
		return locks.Watch // it is not known yet that no pod acts
	case d.gate.acquirable && !compile.Withdrawn(v.Spec.Config) && v.Spec.Problem == nil:
		return locks.Acquire
	}
	return locks.Release
}

const (
	// outsideEvery is how often pods outside the mesh are listed while the first grant waits
	// for them.
	outsideEvery = 2 * time.Second
	// OutsideRarely is the same while shards of an operator without a lock act.
	OutsideRarely = 30 * time.Second
	// entrySettles is how long apiservers may take to follow a new webhook entry.
	entrySettles = 5 * time.Second
)

// bySelector reports whether pods are put on the mesh by a selector, without a label.
func (v *view) bySelector() bool { return origin.KindOf(v.Spec.Config) == origin.VirtualApp }

// otherLocks reports whether pods outside the mesh may lead under other locks: behind Kridge,
// those of its shards.
func (v *view) otherLocks() bool { return origin.KindOf(v.Spec.Config) == origin.Kridge }

// outsideMatters reports whether pods outside the mesh matter, and how often to list them.
func (v *view) outsideMatters() (every time.Duration, matter bool) {
	switch {
	case compile.Withdrawn(v.Spec.Config) || v.Spec.Config.Spec.DryRun:
		return 0, false
	case v.bySelector() && !v.Stored.State.Holds():
		admitted := v.admittedFrom() // until then more of them may be created
		return outsideEvery, !admitted.IsZero() && !v.now.Before(admitted)
	case v.Stored.State.Holds():
		return OutsideRarely, v.bySelector() || len(v.locks) == 0 && len(compile.NamedLocks(v.Spec.Config)) == 0
	}
	return outsideEvery, v.otherLocks() || len(v.locks) == 0 || !v.held() && len(v.uncovered(v.Stored.State.Members)) > 0
}

// admittedFrom returns from when no pod of a VirtualApp can be created outside the mesh; the zero
// time if some can.
func (v *view) admittedFrom() time.Time {
	if since := v.Outside.Entry.Since; !since.IsZero() {
		return since.Add(entrySettles)
	}
	return time.Time{}
}

// unadmitted returns the obstacle that pods of a VirtualApp may run outside the mesh: they are
// older than its webhook entry. nil if there are none.
func (v *view) unadmitted() *locks.Obstacle {
	if v.Outside.Entry.Full {
		return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: "the webhooks of older VirtualApps leave no room for the one that would put its pods on the mesh: delete VirtualApps, or shorten their selectors"}
	}
	if admitted := v.admittedFrom(); admitted.IsZero() || v.Outside.Listed.Before(admitted) {
		return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: "the admission of new pods to the mesh is being set up"}
	}
	return v.outsideActs("")
}

// outsideActs returns the obstacle that pods outside the mesh may act; nil if there are none.
func (v *view) outsideActs(more string) *locks.Obstacle {
	switch {
	case v.Outside.Err != nil:
		return &locks.Obstacle{Reason: v1alpha1.ReasonWaiting, Message: fmt.Sprintf("whether pods run outside the mesh is not known: %v", v.Outside.Err)}
	case len(v.Outside.Pods) > 0:
		remedy := fmt.Sprintf("set label %s: \"true\" on the pod template, so that they are replaced", v1alpha1.EnableProxyLabel)
		if v.bySelector() {
			remedy = "they were created before the VirtualApp: restart them"
		}
		return &locks.Obstacle{Reason: v1alpha1.ReasonOutsidePods,
			Message: fmt.Sprintf("pods of the workload run outside the mesh: %s%s; %s", strings.Join(v.Outside.Pods, ", "), more, remedy)}
	}
	return nil
}
