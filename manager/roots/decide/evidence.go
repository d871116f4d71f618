package decide

import (
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// learn applies the reports of agents since the last round.
func (d *deciding) learn() {
	v := d.v
	stored, m := v.Stored.State, &d.memory
	m.exited = m.exited.observe(v, stored.Members)
	m.forgotten = v.forgotten(m.forgotten, stored.Members)
	m.lost = m.lost.observe(v, stored)
	d.removed = v.removedPods(stored.Members)
	d.next.Evidence.LocksHeld, d.next.Evidence.OthersIdle = v.locksHeld(), v.othersIdle(d.removed)
	for _, e := range v.serials(stored.Members) {
		d.do(e)
	}
	for _, uid := range slices.Sorted(maps.Keys(d.next.Members)) {
		if e := d.evidence(d.next.Members[uid]); e != nil {
			d.do(e)
		}
	}
	// A pod that is no member any more may join again once the state is written.
	maps.DeleteFunc(m.forgotten, func(uid string, _ bool) bool {
		_, member := d.next.Members[uid]
		return !member
	})
}

// forgotten returns the members whose agents reject the policy of a member, because they have
// no record of the pod as one. A pod that was deleted after a backup exists again once the
// backup is restored: its agent has refused it since, or removed it when it exited. before is
// the last result.
func (v *view) forgotten(before map[string]bool, members map[string]handover.Member) map[string]bool {
	out := map[string]bool{}
	for uid, m := range members {
		o, policy := v.observe(m.Node, uid), v.policy(uid)
		required := policy.GetRequiredSerial()
		if before[uid] || required > 0 && o.Nacked == policy.Version && !o.Withheld && (o.Barred || uint64(o.Serial) < required) {
			out[uid] = true
		}
	}
	return out
}

// evidence returns what is new about a member; nil if nothing is.
func (d *deciding) evidence(m handover.Member) handover.Event {
	v := d.v
	pod := v.Pods.ByUID[m.UID]
	o, policy := v.observe(m.Node, m.UID), v.policy(m.UID)
	absent := pod == nil || compile.Ended(pod) || d.memory.forgotten[m.UID]
	switch {
	case d.memory.exited.over(v, m.UID, v.silentSince(o)) && !o.Connected:
		// A pod may be marked as failed before its containers exit. So while its agent is
		// connected, only the agent's report counts.
		return handover.Gone{UID: m.UID}
	case absent && policy.GetRefuse() != "" && policy.GetSerial() > 0 && o.Version == policy.Version:
		return handover.Refused{UID: m.UID, Serial: int64(policy.Serial)}
	}
	// An ack of the same serial with another hash may be of a policy that followed from
	// another history of the state.
	serial := int64(policy.GetSerial())
	if serial == 0 || o.Version != policy.Version {
		return nil
	}
	refused, evidence := policy.Refuse != "", d.next.Evidence
	if _, verified := evidence.Verified[m.Shard]; serial > m.Serial || !evidence.Confirmed[m.UID] || !verified && !refused {
		return handover.Applied{UID: m.UID, Serial: serial, Refused: refused}
	}
	return nil
}

// silentSince returns since when no agent of a node is connected, as far as is known.
func (v *view) silentSince(o push.Observation) time.Time {
	if o.Left.IsZero() {
		return v.Agents.Since
	}
	return o.Left
}

// standsBy reports whether a pod acts on nothing under a policy.
func standsBy(p *meshv1.PodPolicy) bool { return p.GetRefuse() != "" || p.GetSharding().GetStandby() }

// confirms reports whether an agent has confirmed the current policy of a pod.
func (v *view) confirms(node, uid string) bool {
	policy := v.policy(uid)
	return policy.PodPolicy != nil && v.observe(node, uid).Version == policy.Version
}

// refuses reports whether the agent has confirmed that a pod acts on nothing: it is refused,
// or in standby.
func (v *view) refuses(p *corev1.Pod) bool {
	return standsBy(v.policy(string(p.UID)).PodPolicy) && v.confirms(p.Spec.NodeName, string(p.UID))
}

// observesDryRun reports whether the agent has confirmed that a pod acts on everything under
// the root's dry run, and so is in no shard.
func (v *view) observesDryRun(p *corev1.Pod) bool {
	return v.Spec.Config.Spec.DryRun && v.confirms(p.Spec.NodeName, string(p.UID))
}

// quiet reports whether the agents have confirmed that no member leads under the locks of
// its shard any more.
func (v *view) quiet(members map[string]handover.Member) bool {
	return !collect.Any(members, func(uid string, m handover.Member) bool {
		policy := v.policy(uid)
		return !standsBy(policy.PodPolicy) && !policy.GetSharding().GetDryRun() || v.observe(m.Node, uid).Version != policy.Version
	})
}

// unrefused describes the pods that may act on anything, because they ran unsharded or by a
// state that was lost. No shard owns keys before the agents have confirmed that they refuse
// these pods. Pods that are created later are refused from the start.
func (v *view) unrefused(removed []push.Removed) []string {
	out := describe(removed)
	for _, p := range v.Pods.Workload {
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

// othersIdle reports whether no pod on the mesh can act that is not a member.
func (v *view) othersIdle(removed []push.Removed) bool {
	return len(v.strangers(v.Stored.State.Members, removed)) == 0
}

// strangers describes the pods that are no members and may act: those without a shard whose
// agents have not confirmed otherwise, and removed ones. After a restore they may be members
// that the state does not know.
func (v *view) strangers(members map[string]handover.Member, removed []push.Removed) []string {
	out := describe(removed)
	if v.Agents.Policies == nil {
		out = append(out, "the first policies of this manager")
	}
	if v.young() {
		out = append(out, v.Agents.Unconnected...)
	}
	for _, p := range v.Pods.Workload {
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
func (v *view) removedPods(members map[string]handover.Member) []push.Removed {
	out := slices.DeleteFunc(slices.Clone(v.Agents.Removed), func(p push.Removed) bool {
		return p.Over(v.now, v.Agents.RequestTimeout) || p.Namespace != "" && p.Namespace != v.Spec.Config.Namespace
	})
	for id, p := range v.Agents.Policies { // pods whose policy is about to be removed
		uid := string(id)
		_, member := members[uid]
		if pod := v.Pods.ByUID[uid]; member || p.Namespace != v.Spec.Config.Namespace || p.Node == "" || pod != nil && !compile.Ended(pod) {
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
func (v *view) serials(members map[string]handover.Member) (out []handover.Event) {
	nodes := map[string]string{} // by pod uid
	for _, p := range v.Pods.Workload {
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
