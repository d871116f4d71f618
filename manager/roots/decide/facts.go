package decide

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// Facts are what a round observed of a root.
type Facts struct {
	Spec    Spec
	Stored  Stored
	Pods    Pods
	Agents  Agents
	Locks   Locks
	Outside Outside
	Weights Weights
	// Namespaces are those that exist.
	Namespaces []string
	// Shards are the root's shards as they were compiled last.
	Shards []compile.Shard
	// Stamping is the progress of the labels of objects; nil if none are needed.
	Stamping *v1alpha1.StampingStatus
	// MissingBundle is why the CAs of the namespace cannot be written; empty if they can.
	MissingBundle string
	// Scale is nil unless NeedsScale.
	Scale *Scale
	// Revision is that of the StatefulSet's pods, if the root rolls them out.
	Revision Revision
	// Previous is that of PreviousRevision.
	Previous Previous
	// Answers are those to the queries of the last decision.
	Answers map[query.Query]query.Answer
}

// Spec is what is asked of a root.
type Spec struct {
	// Config is the configuration, with what its shards act by.
	Config *v1alpha1.ShardingConfig
	// Asked is what the spec asks the shards to act by, and Change how that differs from what
	// they act by; nil if it does not.
	Asked  *v1alpha1.ActingSpec
	Change *acting.Change
	// Unknown is what the spec names and the apiserver does not serve.
	Unknown resources.Unknown
	// Problem is why the plan must not change; nil if it may.
	Problem   error
	Conflicts []compile.Conflict
	TooLarge  []string // members whose policy exceeds the size that an agent accepts
	// FirstOrdinal is that of the pods of a StatefulSet.
	FirstOrdinal int
}

// Stored is the recorded state of a root.
type Stored struct {
	// Status is as it was last read or written.
	Status v1alpha1.ShardingConfigStatus
	// State is that of Status, with the evidence since ReadAt.
	State  handover.State
	Acting *v1alpha1.ActingSpec // what shards act by; nil if it is not on record
	ReadAt time.Time
}

// Pods are the pods of a root as the API lists them.
type Pods struct {
	// Workload are those of the workload that are on the mesh and have not exited.
	Workload []*corev1.Pod
	// ByUID are the labelled pods of the namespace.
	ByUID map[string]*corev1.Pod
	// NodesGone are the nodes of members without a pod that do not exist.
	NodesGone map[string]bool
}

// PodKey identifies a pod to the agents of a node.
type PodKey struct{ Node, UID string }

// Agents are what agents reported, and what they were sent.
type Agents struct {
	// Observed are the reports on the pods that Watched returns.
	Observed map[PodKey]push.Observation
	// Policies are the last ones that were pushed, by pod uid; nil before the first push.
	Policies map[types.UID]compile.Policy
	// Removed are pods without a policy that may run on and act.
	Removed []push.Removed
	// Unconnected describe the agents that have not connected since this manager became the
	// leader.
	Unconnected []string
	// Since is when this manager became the leader.
	Since time.Time
	// RequestTimeout is the apiserver's --request-timeout.
	RequestTimeout time.Duration
}

// Locks are the operator's locks and those of the shards.
type Locks struct {
	// Surveyed are the operator's locks; States what is known of them.
	Surveyed []v1alpha1.LockStatus
	States   map[types.NamespacedName]locks.State
	// Undiscovered is why a lock that members showed is not among them; nil if none.
	Undiscovered *locks.Obstacle
	// Claimed are those that another configuration has as well.
	Claimed map[types.NamespacedName]bool
	// Forbidden is why members may not update the locks of their shards; empty if they may.
	Forbidden string
	// Asked is that of the root's demand as it was published before the locks were surveyed.
	Asked uint64
	// Holders are the holders of the shards' locks that Unled returns.
	Holders map[types.NamespacedName]string
	// Lease is the longest lease of the locks that Lingering returns.
	Lease time.Duration
}

// Outside is what is known of the pods of the workload outside the mesh.
type Outside struct {
	// Pods are their names at the time Listed; Err is why they are not known.
	Pods   []string
	Listed time.Time
	// Act reports whether some of them run, and have for a while.
	Act bool
	Err error
	// Entry is how new pods of a VirtualApp get on the mesh.
	Entry Entry
}

// Entry is what is known of the policy or webhook that puts new pods of a VirtualApp on the mesh.
type Entry struct {
	Since time.Time // from when on it was in place; zero if it is not
	Full  bool      // there is no room for it
}

// Weights are the weights of namespaces.
type Weights struct {
	Of layout.Weights
	// Counted reports whether they suffice for the first division, Current for balancing.
	Counted, Current bool
	// Problem is why objects cannot be counted; empty if they can.
	Problem string
}

// Scale is the desired number of pods of a root's workloads, or why it is not known.
type Scale struct {
	Replicas int
	Err      error
}

// view is what a round knows.
type view struct {
	Facts
	now time.Time
	// locks are the operator's locks, as they are to be written.
	locks []v1alpha1.LockStatus
}

func newView(f Facts, now time.Time) *view {
	v := &view{Facts: f, now: now}
	v.locks = v.kept()
	return v
}

// kept returns the operator's locks, as they are to be written.
func (v *view) kept() []v1alpha1.LockStatus {
	discovered := func(l v1alpha1.LockStatus) bool { return l.Discovered }
	named := slices.DeleteFunc(slices.Clone(v.Locks.Surveyed), discovered)
	if unheld := locks.Unheld(named, v.lockState, v.holder); unheld != nil && len(v.Stored.Status.Locks) == 0 && v.Stored.State.Holds() {
		// An earlier version left members with locks that the mesh did not hold: they
		// keep them until it does.
		return nil
	}
	return v.Locks.Surveyed
}

// young reports whether agents may not have connected yet to this leader.
func (v *view) young() bool { return v.now.Sub(v.Agents.Since) < status.Grace }

// policy returns the last pushed policy of a pod.
func (v *view) policy(uid string) compile.Policy { return v.Agents.Policies[types.UID(uid)] }

// observe returns what the agent of a node reported about a pod.
func (v *view) observe(node, uid string) push.Observation {
	return v.Agents.Observed[PodKey{node, uid}]
}

// observed returns what the agent of its node reported about a pod.
func (v *view) observed(p *corev1.Pod) push.Observation {
	return v.observe(p.Spec.NodeName, string(p.UID))
}

// Watched returns the pods whose reports Decide needs. It needs the state, the pods and the
// policies of f.
func Watched(m Memory, f Facts) map[PodKey]bool {
	out := map[PodKey]bool{}
	for _, p := range f.Pods.Workload {
		out[PodKey{p.Spec.NodeName, string(p.UID)}] = true
	}
	for uid, member := range f.Stored.State.Members {
		out[PodKey{member.Node, uid}] = true
	}
	for uid, p := range m.lost.pods {
		out[PodKey{p.Node, uid}] = true
	}
	for uid, p := range f.Agents.Policies {
		if pod := f.Pods.ByUID[string(uid)]; p.Namespace == f.Spec.Config.Namespace && (pod == nil || compile.Ended(pod)) {
			out[PodKey{p.Node, string(uid)}] = true
		}
	}
	return out
}

// ListOutside reports whether the pods of the workload outside the mesh must be listed. It
// needs all of f but Holders and Scale.
func ListOutside(f Facts, now time.Time) bool {
	every, matter := newView(f, now).outsideMatters()
	return matter && now.Sub(f.Outside.Listed) >= every
}

// Evidence returns what facts prove about the pods that are no members, as Decide gives it to
// the next state. It is for tests/explore, which applies reports one at a time.
func Evidence(f Facts, now time.Time) (othersIdle, locksHeld bool) {
	v := newView(f, now)
	return v.othersIdle(v.removedPods(f.Stored.State.Members)), v.locksHeld()
}

// Ready returns the shards that can take keys. It is for tests/explore, too.
func Ready(f Facts, now time.Time) map[string]bool {
	return newView(f, now).ready(f.Stored.State.Members)
}

// Serials returns what Decide learns from the serials that agents reported. It is for
// tests/explore, too.
func Serials(f Facts, now time.Time) []handover.Event {
	return newView(f, now).serials(f.Stored.State.Members)
}
