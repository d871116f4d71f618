package roots

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// view is what a round knows about the pods of one root.
type view struct {
	world  World
	config *v1alpha1.ShardingConfig
	// asked is what the spec asks the shards to act by, and change how that differs from what
	// they act by; nil if it does not.
	asked  *v1alpha1.ActingSpec
	change *acting.Change
	// unknown is what the spec names and the apiserver does not serve.
	unknown resources.Unknown
	// first is the first ordinal of the pods of a StatefulSet.
	first int
	// problem is why the plan must not change; nil if it may.
	problem   error
	conflicts []compile.Conflict
	tooLarge  []string // members whose policy exceeds the size that an agent accepts
	// pods are those of the workload that are on the mesh and have not exited.
	pods []*corev1.Pod
	// removed are pods without a policy that may act under the root.
	removed []push.Removed
	// all are the labelled pods of the namespace, by uid.
	all map[string]*corev1.Pod
	// observe returns what the agent of a node reported about a pod.
	observe func(node, uid string) push.Observation
	locks   locks.Known
	since   time.Time // when this manager became the leader
	young   bool      // agents may not have connected since
}

func (r *Roots) look(config *v1alpha1.ShardingConfig, w World) view {
	v := view{world: w, config: config, all: map[string]*corev1.Pod{}, observe: r.Observe, locks: r.Locks, since: r.since, young: r.Young()}
	v.asked, v.change = w.Enacted.Asked[config.UID], w.Enacted.Changes[config.UID]
	v.unknown = w.Unknown[config.UID]
	if v.problem = compile.Invalid(config); v.problem == nil {
		v.problem = w.Unresolved[config.UID]
	}
	for _, s := range w.Compiled.Shards {
		if s.Config == nil || origin.Of(s.Config) != origin.Of(config) {
			continue
		}
		v.conflicts, v.tooLarge = s.Conflicts, s.TooLarge
		if v.problem == nil && s.Problem != nil && s.Config.Generation == config.Generation {
			v.problem = errors.New(s.Problem.Message)
		}
	}
	for _, p := range w.Pods {
		if p.Namespace != config.Namespace {
			continue
		}
		v.all[string(p.UID)] = p
		if compile.Labelled(p) && !compile.Ended(p) && layout.Selects(config.Spec.Root, p) {
			v.pods = append(v.pods, p)
		}
	}
	return v
}

// policy returns the last pushed policy of a pod.
func (v view) policy(uid string) compile.Policy { return v.world.Compiled.Policies[types.UID(uid)] }

// observed returns what the agent of its node reported about a pod.
func (v view) observed(p *corev1.Pod) push.Observation {
	return v.observe(p.Spec.NodeName, string(p.UID))
}

// exists reports whether a member exists, and is neither being deleted nor has exited.
func (v view) exists(m handover.Member) bool {
	pod := v.all[m.UID]
	return pod != nil && pod.DeletionTimestamp == nil && !compile.Ended(pod)
}

// serves reports whether a member is ready and, by its agent's last report, acts on the
// scope of its shard.
func (v view) serves(m handover.Member, o push.Observation) bool {
	_, sharded := compile.Serial(o.Version)
	return v.exists(m) && status.PodReady(v.all[m.UID]) && o.Capture != "" && sharded && v.policy(m.UID).GetRefuse() == ""
}

// health returns the health of a member. Only the API reports that a member is down: its
// agent may be slow or disconnected while it serves.
func (v view) health(m handover.Member) handover.Health {
	o := v.observe(m.Node, m.UID)
	switch {
	case !v.exists(m):
		return handover.Unknown
	case !status.PodReady(v.all[m.UID]):
		return handover.Down
	case v.serves(m, o) && o.Connected && o.Version == v.policy(m.UID).GetVersion():
		return handover.Up
	}
	return handover.Unknown
}

// ready returns the shards with a member that serves, or will again once its agent
// reconnects.
func (v view) ready(members map[string]handover.Member, now time.Time) map[string]bool {
	out := map[string]bool{}
	for _, m := range members {
		o := v.observe(m.Node, m.UID)
		if v.serves(m, o) && (o.Connected || now.Before(o.Left.Add(status.Grace))) {
			out[m.Shard] = true
		}
	}
	return out
}

// reported reports whether it is known which shards are ready: a new leader must not revert
// what the last one began only because agents have not connected to it yet.
func (v view) reported(members map[string]handover.Member, now time.Time) bool {
	unknown := func(_ string, m handover.Member) bool { return v.exists(m) && !v.observe(m.Node, m.UID).Known }
	return now.Sub(v.since) >= status.Grace || !collect.Any(members, unknown)
}

// silentSince returns since when no agent of a node is connected, as far as is known.
func (v view) silentSince(o push.Observation) time.Time {
	if o.Left.IsZero() {
		return v.since
	}
	return o.Left
}

// standsBy reports whether a pod acts on nothing under a policy.
func standsBy(p *meshv1.PodPolicy) bool { return p.GetRefuse() != "" || p.GetSharding().GetStandby() }

// confirms reports whether an agent has confirmed the current policy of a pod.
func (v view) confirms(node, uid string) bool {
	policy := v.policy(uid)
	return policy.PodPolicy != nil && v.observe(node, uid).Version == policy.Version
}

// refuses reports whether the agent has confirmed that a pod acts on nothing: it is refused,
// or in standby.
func (v view) refuses(p *corev1.Pod) bool {
	return standsBy(v.policy(string(p.UID)).PodPolicy) && v.confirms(p.Spec.NodeName, string(p.UID))
}

// observesDryRun reports whether the agent has confirmed that a pod acts on everything under
// the root's dry run, and so is in no shard.
func (v view) observesDryRun(p *corev1.Pod) bool {
	return v.config.Spec.DryRun && v.confirms(p.Spec.NodeName, string(p.UID))
}

// unsharded reports whether a pod is ready, and runs without a shard by its policy.
func (v view) unsharded(p *corev1.Pod) bool {
	o, policy := v.observed(p), v.policy(string(p.UID))
	return status.PodReady(p) && policy.PodPolicy != nil && policy.Refuse == "" && policy.Sharding == nil && o.Connected && o.Version == policy.Version
}

// quiet reports whether the agents have confirmed that no member leads under the locks of
// its shard any more.
func (v view) quiet(members map[string]handover.Member) bool {
	return !collect.Any(members, func(uid string, m handover.Member) bool {
		policy := v.policy(uid)
		return !standsBy(policy.PodPolicy) && !policy.GetSharding().GetDryRun() || v.observe(m.Node, uid).Version != policy.Version
	})
}

// admitted reports whether a pod was admitted as the configuration requires: a pod whose
// clients can verify the real apiserver is no exclusive member.
func (v view) admitted(p *corev1.Pod) bool {
	return p.Annotations[v1alpha1.TrustAnnotation] != "" && (compile.Exclusive(p) || compile.Trust(v.config) == v1alpha1.TrustBoth)
}

// joining returns the pods that may be assigned to a shard now: their agents refuse them all.
func (v view) joining(placed map[string]string) (out []handover.Member) {
	for _, p := range v.pods {
		uid, node := string(p.UID), p.Spec.NodeName
		shard := placed[uid]
		if shard == "" || node == "" || p.DeletionTimestamp != nil || !v.admitted(p) ||
			slices.ContainsFunc(v.conflicts, func(c compile.Conflict) bool { return c.Pod == p.Name }) {
			continue
		}
		if v.refuses(p) && v.observe(node, uid).Capture != "" {
			out = append(out, handover.Member{UID: uid, Name: p.Name, Node: node, Shard: shard})
		}
	}
	return out
}

// uncovered returns the shards without a ready pod that could take their keys.
func (v view) uncovered(members map[string]handover.Member) []string {
	placed, _ := layout.Place(v.config.Spec.Root, v.first, v.pods, members)
	covered := map[string]bool{}
	for _, p := range v.pods {
		if uid := string(p.UID); v.refuses(p) && v.admitted(p) && status.PodReady(p) && v.observed(p).Capture != "" {
			covered[cmp.Or(members[uid].Shard, placed[uid])] = true
		}
	}
	names := collect.Map(layout.Shards(v.config.Spec.Root), func(s layout.Shard) string { return s.Name })
	return collect.Filter(names, func(name string) bool { return !covered[name] })
}

// misfits returns the pods that act on nothing and whose trust is wrong for their next role:
// as members, or, if the root is being deleted, as pods that run unsharded.
func (v view) misfits(members map[string]handover.Member) (out []*corev1.Pod) {
	deleted := v.config.DeletionTimestamp != nil
	for _, p := range v.pods {
		_, member := members[string(p.UID)]
		if member || p.DeletionTimestamp != nil || p.Spec.NodeName == "" {
			continue
		}
		if deleted && p.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustMesh || !deleted && !compile.Withdrawn(v.config) && !v.admitted(p) {
			out = append(out, p)
		}
	}
	return out
}

// unrefused describes the pods that may act on anything, because they ran unsharded or by a
// state that was lost. No shard owns keys before the agents have confirmed that they refuse
// these pods. Pods that are created later are refused from the start.
func (v view) unrefused() []string {
	out := describe(v.removed)
	for _, p := range v.pods {
		if p.Spec.NodeName == "" {
			continue
		}
		captured := v.observed(p).Capture != ""
		if !v.refuses(p) || !captured && p.Status.Phase != corev1.PodPending {
			out = append(out, fmt.Sprintf("pod %s on node %s, whose agent has not confirmed yet that it acts on nothing until it is in a shard", p.Name, p.Spec.NodeName))
		}
	}
	return out
}

// strangers describes the pods that are no members and may act: those without a shard whose
// agents have not confirmed otherwise, and removed ones. After a restore they may be members
// that the state does not know.
func (v view) strangers(members map[string]handover.Member) []string {
	out := describe(v.removed)
	if v.world.Compiled.Policies == nil {
		out = append(out, "the first policies of this manager")
	}
	if v.young {
		for _, node := range v.world.Unconnected {
			out = append(out, fmt.Sprintf("the agent of node %s, which may have pods that the apiserver does not know", node))
		}
	}
	for _, p := range v.pods {
		_, member := members[string(p.UID)]
		if !member && p.Spec.NodeName != "" && !v.refuses(p) && !v.observesDryRun(p) {
			out = append(out, fmt.Sprintf("pod %s on node %s", p.Name, p.Spec.NodeName))
		}
	}
	return out
}

func describe(removed []push.Removed) []string {
	return collect.Map(removed, func(p push.Removed) string {
		return fmt.Sprintf("the pod with uid %s on node %s, which was deleted or has exited, and may run on", p.UID, p.Node)
	})
}

// removedPods returns the pods without a policy that may act under the root. Without an
// agent, a pod may act until a request timeout after its agent disconnected and the pod was
// deleted.
func (v view) removedPods(members map[string]handover.Member, now time.Time) []push.Removed {
	out := slices.DeleteFunc(slices.Clone(v.world.Removed), func(p push.Removed) bool {
		over := !p.Left.IsZero() && expired(p.Left, v.world.RequestTimeout, now)
		return over || p.Namespace != "" && p.Namespace != v.config.Namespace
	})
	for id, p := range v.world.Compiled.Policies { // pods whose policy is about to be removed
		uid := string(id)
		_, member := members[uid]
		if pod := v.all[uid]; member || p.Namespace != v.config.Namespace || p.Node == "" || pod != nil && !compile.Ended(pod) {
			continue
		}
		if !standsBy(p.PodPolicy) || !v.confirms(p.Node, uid) {
			out = append(out, push.Removed{Node: p.Node, Namespace: p.Namespace, UID: uid})
		}
	}
	return out
}

// serials returns what agents reported about the serials of members and waiting pods. The
// core decides which of them the state does not account for.
func (v view) serials(members map[string]handover.Member) (out []handover.Event) {
	nodes := map[string]string{} // by pod uid
	for _, p := range v.pods {
		nodes[string(p.UID)] = p.Spec.NodeName
	}
	for uid, m := range members {
		nodes[uid] = m.Node
	}
	for _, uid := range slices.Sorted(maps.Keys(nodes)) {
		o := v.observe(nodes[uid], uid)
		policy := v.policy(uid)
		switch served := policy.PodPolicy != nil && policy.Refuse == ""; {
		case o.Serial == 0:
		case served && policy.RequiredSerial == 0 && (o.Barred || rejects(o, policy)):
			out = append(out, handover.Barred{UID: uid, Serial: o.Serial})
		default:
			out = append(out, handover.Ahead{UID: uid, Serial: o.Serial})
		}
	}
	return out
}

// rejects reports whether an agent rejected a policy because another one with its serial is
// in force. Older agents do not report that this was a refusal, which bars its serial.
func rejects(o push.Observation, policy compile.Policy) bool {
	serial, _ := compile.Serial(o.Version)
	return serial > 0 && serial == int64(policy.Serial) && o.Serial == serial && o.Version != policy.Version && o.Nacked == policy.Version
}

// holder describes an identity: clients commonly make it of their pod's name, "_" and
// a random text.
func (v view) holder(identity string) string {
	workload := layout.Target(v.config.Spec.Root).Name
	if pod, _, _ := strings.Cut(identity, "_"); workload != "" && strings.HasPrefix(pod, workload+"-") {
		return fmt.Sprintf("%q (pod %s)", identity, pod)
	}
	return fmt.Sprintf("%q", identity)
}

// unreleased reports whether the mesh holds a lock that no other configuration has: no
// pod can lead that runs unsharded.
func (v view) unreleased(known []v1alpha1.LockStatus) bool {
	return slices.ContainsFunc(known, func(l v1alpha1.LockStatus) bool {
		return l.HeldByMesh && locks.Claimed(v.config, types.NamespacedName{Namespace: l.Namespace, Name: l.Name}, v.world.Configs, v.locks) == ""
	})
}
