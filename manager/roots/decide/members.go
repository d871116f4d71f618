package decide

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/readiness"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// exists reports whether a member exists, and is neither being deleted nor has exited.
func (v *view) exists(m handover.Member) bool {
	pod := v.Pods.ByUID[m.UID]
	return pod != nil && pod.DeletionTimestamp == nil && !compile.Ended(pod)
}

// serves reports whether a member is ready and, by its agent's last report, acts on the
// scope of its shard.
func (v *view) serves(m handover.Member, o push.Observation) bool {
	_, sharded := compile.Serial(o.Version)
	return v.exists(m) && readiness.Of(v.Pods.ByUID[m.UID]) && o.Capture != "" && sharded && v.policy(m.UID).GetRefuse() == ""
}

// health returns the health of a member. Only the API reports that a member is down: its
// agent may be slow or disconnected while it serves.
func (v *view) health(m handover.Member) handover.Health {
	o := v.observe(m.Node, m.UID)
	switch {
	case !v.exists(m):
		return handover.Unknown
	case !readiness.Of(v.Pods.ByUID[m.UID]):
		return handover.Down
	case v.serves(m, o) && o.Connected && o.Version == v.policy(m.UID).GetVersion():
		return handover.Up
	}
	return handover.Unknown
}

// ready returns the shards with a member that serves, or will again once its agent
// reconnects.
func (v *view) ready(members map[string]handover.Member) map[string]bool {
	out := map[string]bool{}
	for _, m := range members {
		o := v.observe(m.Node, m.UID)
		if v.serves(m, o) && (o.Connected || v.now.Before(o.Left.Add(status.Grace))) {
			out[m.Shard] = true
		}
	}
	return out
}

// reported reports whether it is known which shards are ready: a new leader must not revert
// what the last one began only because agents have not connected to it yet.
func (v *view) reported(members map[string]handover.Member) bool {
	unknown := func(_ string, m handover.Member) bool { return v.exists(m) && !v.observe(m.Node, m.UID).Reported }
	return v.now.Sub(v.Agents.Since) >= status.Grace || !collect.Any(members, unknown)
}

// unsharded reports whether a pod is ready, and runs without a shard by its policy.
func (v *view) unsharded(p *corev1.Pod) bool {
	o, policy := v.observed(p), v.policy(string(p.UID))
	return readiness.Of(p) && policy.PodPolicy != nil && policy.Refuse == "" && policy.Sharding == nil && o.Connected && o.Version == policy.Version
}

// admitted reports whether a pod was admitted as the configuration requires: a pod whose
// clients can verify the real apiserver is no exclusive member.
func (v *view) admitted(p *corev1.Pod) bool {
	return p.Annotations[v1alpha1.TrustAnnotation] != "" && (compile.Exclusive(p) || compile.Trust(v.Spec.Config) == v1alpha1.TrustBoth)
}

// joining returns the pods that may be assigned to a shard now: their agents refuse them all.
func (v *view) joining(placed map[string]string, members map[string]handover.Member) (out []handover.Member) {
	occupied := v.occupied(members)
	for _, p := range v.Pods.Workload {
		uid, node := string(p.UID), p.Spec.NodeName
		shard := placed[uid]
		if shard == "" || occupied[shard] || node == "" || p.DeletionTimestamp != nil || !v.admitted(p) ||
			slices.ContainsFunc(v.Spec.Conflicts, func(c compile.Conflict) bool { return c.Pod == p.Name }) {
			continue
		}
		if v.refuses(p) && v.observe(node, uid).Capture != "" {
			out = append(out, handover.Member{UID: uid, Name: p.Name, Node: node, Shard: shard})
		}
	}
	return out
}

// occupied returns the shards that no pod joins before their members are replaced, because these
// belong to the workload that was the target before. Without an election both would act on the keys
// of the shard.
func (v *view) occupied(members map[string]handover.Member) map[string]bool {
	out := map[string]bool{}
	if len(v.locks) > 0 || len(compile.NamedLocks(v.Spec.Config)) > 0 {
		return out
	}
	selects := layout.Selects(v.Spec.Config.Spec.Root)
	for uid, m := range members {
		if p := v.Pods.ByUID[uid]; p != nil && !compile.Ended(p) && !selects(p) {
			out[m.Shard] = true
		}
	}
	return out
}

// uncovered returns the shards without a ready pod that could take their keys.
func (v *view) uncovered(members map[string]handover.Member) []string {
	placed, _ := layout.Place(v.Spec.Config.Spec.Root, v.Spec.FirstOrdinal, v.Pods.Workload, members)
	covered := map[string]bool{}
	for _, p := range v.Pods.Workload {
		if uid := string(p.UID); v.refuses(p) && v.admitted(p) && readiness.Of(p) && v.observed(p).Capture != "" {
			covered[cmp.Or(members[uid].Shard, placed[uid])] = true
		}
	}
	names := collect.Map(layout.Shards(v.Spec.Config.Spec.Root), func(s layout.Shard) string { return s.Name })
	return collect.Filter(names, func(name string) bool { return !covered[name] })
}

// misfits returns the pods that act on nothing and whose trust is wrong for their next role:
// as members, or, if the root is being deleted, as pods that run unsharded.
func (v *view) misfits(members map[string]handover.Member) (out []*corev1.Pod) {
	deleted := v.Spec.Config.DeletionTimestamp != nil
	for _, p := range v.Pods.Workload {
		_, member := members[string(p.UID)]
		if member || p.DeletionTimestamp != nil || p.Spec.NodeName == "" {
			continue
		}
		if deleted && p.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustMesh || !deleted && !compile.Withdrawn(v.Spec.Config) && !v.admitted(p) {
			out = append(out, p)
		}
	}
	return out
}

// assignPods adds pods to shards, and marks those that must be replaced.
func (d *deciding) assignPods() {
	v := d.v
	spec := v.Spec.Config.Spec.Root
	if compile.Withdrawn(v.Spec.Config) { // deleted or disabled: all members must be replaced
		spec = spec.DeepCopy()
		spec.Disable = new(true)
	}
	placed, outdated := layout.Place(spec, v.Spec.FirstOrdinal, v.Pods.Workload, d.next.Members)
	// During a change no pod is assigned: the gate of the former spec may be closed, and that of
	// the next one does not consider its pods.
	if join := v.joining(placed, d.next.Members); len(join) > 0 && !v.changes() {
		d.do(handover.Join{Members: join})
	}
	for _, uid := range d.memory.plan.lasting(outdated, v.now) {
		d.do(handover.Outdated{UID: uid})
	}
	selects := layout.Selects(v.Spec.Config.Spec.Root)
	for uid := range d.next.Members {
		if p := v.Pods.ByUID[uid]; p != nil && (!selects(p) || !v.admitted(p)) {
			d.do(handover.Outdated{UID: uid})
		}
	}
}
