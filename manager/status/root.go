package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/undivided"
)

// BlockedAfter is how long a phase of a handover may last before the status reports it.
const BlockedAfter = 30 * time.Second

// blockedMessage is the message about a blocked handover.
var blockedMessage = "a handover has waited for more than " + BlockedAfter.String()

// Values of RootStatus.Handover.
const (
	Settled    = "Settled"
	Releasing  = string(handover.Releasing)
	Granting   = string(handover.Granting)
	Restarting = "Restarting"
	Waiting    = "Waiting"
	Blocked    = "Blocked"
)

// RootInput is the input for the status of one configuration with spec.root.
type RootInput struct {
	Common
	Config *v1alpha1.ShardingConfig
	State  handover.State
	// Root is State as it is to be written, with the counts of namespaces, weights, skew and
	// suggestion. It lacks Handover, and WaitsFor of Handovers, which are in the order of
	// State.Moves.
	Root v1alpha1.RootStatus
	// Pods are the pods of the workload that are on the mesh and have not exited.
	Pods []*corev1.Pod
	// Conflicts are the pods that another configuration selects too.
	Conflicts []compile.Conflict
	// TooLarge are the pods whose policy exceeds the size that an agent accepts.
	TooLarge []string
	// Problem is the reason why the configuration has no effect; nil if it has.
	Problem error
	// Restarting describes the eviction that is in progress, or what blocks it.
	Restarting string
	// Unconfirmed names the pods whose agents must confirm before any shard owns keys.
	Unconfirmed []string
	// Leaders are the leaders of the shards that should act, by the shard's name.
	Leaders map[string]Leader
	// Undivided is what members do beyond what their shards own.
	Undivided undivided.Result
}

// OfRoot computes the status of a configuration with spec.root. It does not change the
// recorded state.
func OfRoot(in RootInput) v1alpha1.ShardingConfigStatus {
	w := in.workload()
	root := in.Root
	root.Shards = slices.Clone(root.Shards)
	root.Handovers = slices.Clone(root.Handovers)
	root.ChildShardingConfigs = nil
	for i := range root.Shards {
		s := &root.Shards[i]
		root.ChildShardingConfigs = append(root.ChildShardingConfigs, s.Name)
		s.Members, s.ReadyMembers = w.members[s.Name], w.ready[s.Name]
		s.Leader = in.Leaders[s.Name].Pod
	}
	for i := range root.Handovers {
		if i < len(in.State.Moves) {
			root.Handovers[i].WaitsFor = w.waitsFor(in.State.Moves[i])
		}
	}
	root.Handover = in.handover()
	root.Undivided, root.ForeignWrites = in.Undivided.Undivided, in.Undivided.Foreign

	out := v1alpha1.ShardingConfigStatus{
		ObservedGeneration: in.Config.Generation,
		Conditions:         slices.Clone(in.Config.Status.Conditions),
		Shards:             int32(len(root.Shards)),
		Selector:           selectorOf(root.ChildShardingConfigs),
		Members:            int32(len(in.Pods) - w.surplus),
		Method:             w.method(),
		Stamping:           in.Stamping,
		Locks:              in.Locks,
		Root:               &root,
	}
	for _, n := range w.ready {
		out.ReadyMembers += n
	}
	out.Pods = show(w.verdicts)
	w.conditions(&out)
	return out
}

// selectorOf returns a selector of the members of shards. It is empty without shards: an
// empty selector selects all pods for some readers, and none for an HorizontalPodAutoscaler.
func selectorOf(shards []string) string {
	if len(shards) == 0 {
		return ""
	}
	return v1alpha1.ShardLabel + " in (" + strings.Join(shards, ",") + ")"
}

// handover returns the state of all handovers in one word.
func (in RootInput) handover() string {
	word := Settled
	for _, m := range in.State.Moves {
		switch {
		case in.Now.Sub(m.Since) > BlockedAfter:
			return Blocked
		case m.Phase == handover.Releasing:
			word = Releasing
		case word == Settled:
			word = Granting
		}
	}
	if word != Settled {
		return word
	}
	if in.restarts() {
		return Restarting
	}
	if len(in.Unconfirmed) > 0 || len(in.unready()) > 0 || in.Obstacle != nil && !in.State.Holds() {
		return Waiting
	}
	return Settled
}

// restarts reports whether a pod must be restarted, or its successor has yet to start. A
// deleted pod stays a member until its last writes cannot take effect any more, which may take
// a minute. Only the next handover waits for that.
func (in RootInput) restarts() bool {
	return collect.Any(in.State.Members, func(uid string, m handover.Member) bool {
		there := func(p *corev1.Pod) bool { return string(p.UID) == uid }
		return m.Stale && (in.Restarting != "" || slices.ContainsFunc(in.Pods, there))
	})
}

// unready describes what handovers wait for that cannot begin, because no member could take
// the keys.
func (in RootInput) unready() []string {
	var out []string
	names := slices.Sorted(maps.Keys(in.State.Shards))
	var pinned sharding.Scope
	for _, name := range names {
		if s := in.State.Shards[name]; in.State.Pinned(name) {
			if pinned = sharding.Union(pinned, s.Sent()); !s.Wanted.Equal(s.Target) {
				out = append(out, "an agent that confirms which keys shard "+name+" owns: until then it gives and takes none")
			}
		}
	}
	for _, taker := range names {
		s := in.State.Shards[taker]
		if !in.State.Pinned(taker) && !s.Wanted.Minus(s.Target).Minus(pinned).Empty() {
			out = append(out, "a ready member of shard "+taker+", whose keys stay with others until then")
		}
	}
	return out
}

// workload is the status of a root's pods.
type workload struct {
	RootInput
	verdicts []verdict          // of Pods
	byUID    map[string]verdict // the same
	members  map[string]int32   // by shard
	ready    map[string]int32
	lacking  []string // shards that lack pods
	missing  int      // number of pods that they lack
	surplus  int      // number of pods that no shard needs
}

// sharded reports whether a member's policy is that of a shard: only such policies have a
// serial. The policies were compiled before this state, so a member that was just assigned is
// still in standby. In a dry run no pod has a shard.
func (in RootInput) sharded(uid string) bool {
	_, ok := compile.Serial(in.Wanted(uid))
	return ok || in.Config.Spec.DryRun
}

func (in RootInput) workload() *workload {
	w := &workload{RootInput: in, byUID: map[string]verdict{}, members: map[string]int32{}, ready: map[string]int32{}}
	each := Input{Common: in.Common, Shard: compile.Shard{Config: in.Config, Conflicts: in.Conflicts, TooLarge: in.TooLarge}}
	over := compile.Withdrawn(in.Config) && !in.State.Holds()
	free := 0
	for _, pod := range in.Pods {
		uid := string(pod.UID)
		v := each.member(pod)
		m, assigned := in.State.Members[uid]
		if assigned {
			w.members[m.Shard]++
		} else {
			free++
		}
		switch {
		case over || !v.ready:
		case !assigned:
			v.ready, v.Message = false, "it is in standby until a shard takes it"
		case !in.sharded(uid):
			v.ready, v.Message = false, "it is in standby until its agent receives the policy of its shard"
		}
		if v.ready {
			w.ready[m.Shard]++
		}
		w.verdicts = append(w.verdicts, v)
		w.byUID[uid] = v
	}
	if !over {
		w.compare(free)
	}
	return w
}

// compare counts the pods that shards lack, and the surplus. free is the number of pods without
// a shard.
func (w *workload) compare(free int) {
	open := false
	for _, s := range layout.Shards(w.Config.Spec.Root) {
		have, want := int(w.members[s.Name]), s.Replicas
		if want == 0 {
			want, open = max(1, have), true
		}
		if have < want {
			w.lacking = append(w.lacking, s.Name)
			w.missing += want - have
		}
	}
	if free > w.missing && !open && !compile.Withdrawn(w.Config) {
		w.surplus = free - w.missing
	}
	w.missing = max(0, w.missing-free)
}

// waitsFor names the members that a move waits for, and why.
func (w *workload) waitsFor(m handover.Move) []string {
	var out []string
	laggards := w.State.Laggards(m)
	for i, l := range laggards {
		if i == maxWaited {
			out = append(out, fmt.Sprintf("and %d more", len(laggards)-i))
			break
		}
		where := "pod " + l.Name
		if l.Node != "" {
			where += " on node " + l.Node
		}
		out = append(out, where+": "+w.why(l))
	}
	if len(out) == 0 && w.Obstacle != nil {
		out = append(out, w.Obstacle.Message)
	}
	return out
}

// why returns why a move waits for a member.
func (w *workload) why(m handover.Member) string {
	v, exists := w.byUID[m.UID]
	o := w.Observe(m.Node, m.UID)
	switch {
	case !exists && !o.Connected:
		return "it was deleted, and no agent of its node is connected to confirm that it is refused: delete the Node object if the node does not come back"
	case !exists:
		return "it was deleted, and its agent has not confirmed yet that it is refused"
	case !v.ready && v.Message != "" && o.Version == w.Wanted(m.UID):
		return v.Message
	case !o.Connected:
		return "no agent of its node is connected: see whether the pod of DaemonSet ctrlmesh-agent runs there"
	case o.Nacked != "" && o.Nacked == w.Wanted(m.UID):
		return "its agent could not apply the policy: " + o.Nack
	case o.Version != w.Wanted(m.UID):
		return "its agent has not confirmed yet: a write may be under way"
	}
	return "its agent has just confirmed"
}

// method returns the methods that apply, or the requested one until an agent has reported.
func (w *workload) method() string {
	var observed []push.Observation
	for uid, m := range w.State.Members {
		observed = append(observed, w.Observe(m.Node, uid))
	}
	return cmp.Or(methods(observed), requested(w.Config.Spec.Root))
}

// requested returns the method that a root requests; empty if the agents choose it.
func requested(root *v1alpha1.RootConfig) string {
	if root.Method == v1alpha1.MethodAuto {
		return ""
	}
	return string(root.Method)
}

// methods returns all methods that apply to lists.
func methods(observed []push.Observation) string {
	seen := sets.Set[string]{}
	for _, o := range observed {
		seen.Insert(slices.Collect(maps.Values(o.Methods))...)
	}
	return strings.Join(sets.List(seen), ",")
}
