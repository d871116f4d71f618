package decide

import (
	"fmt"
	"maps"
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// exited are the members that have exited according to the API, by uid, and when this leader
// first saw that.
type exited map[string]time.Time

// observe returns which members have exited: those in a terminal phase, and those whose
// object and Node are deleted. The deletion of the object alone proves nothing: a pod that
// was deleted by force may still run on an unreachable node.
func (e exited) observe(v *view, members map[string]handover.Member) exited {
	next := exited{}
	for uid, m := range members {
		pod := v.Pods.ByUID[uid]
		if pod != nil && !compile.Ended(pod) || pod == nil && !v.Pods.NodesGone[m.Node] {
			continue
		}
		next[uid] = collect.Since(e, uid, v.now)
	}
	return next
}

// over reports whether no request of a member without an agent can take effect any more:
// the apiserver's bound on requests has passed since the member exited and its agent
// disconnected.
func (e exited) over(v *view, uid string, silent time.Time) bool {
	since, ok := e[uid]
	return ok && v.expired(since, silent)
}

// expired reports whether all requests that were sent by the latest of some moments are past the
// apiserver's bound on requests.
func (v *view) expired(since ...time.Time) bool {
	return v.now.Sub(slices.MaxFunc(since, time.Time.Compare)) >= v.Agents.RequestTimeout+meshv1.LostWrite
}

// lost are the pods without a shard that were deleted or exited before the first grant.
// Their processes may still run, and act on everything. They are refused, and the first
// grant waits until their agents have confirmed that.
type lost struct {
	seen map[string]handover.Member // pods that exist, by uid
	pods map[string]lostPod         // by uid
}

type lostPod struct {
	handover.Member
	since time.Time // when this leader saw that it was deleted or has exited
}

// observe returns which pods are lost, without those that act on nothing any more. Without
// an agent, that is so a request timeout after the agent disconnected and the pod was lost.
func (l lost) observe(v *view, state handover.State) lost {
	if state.Holds() {
		return lost{}
	}
	seen := map[string]handover.Member{}
	for _, p := range v.Pods.Workload {
		if _, member := state.Members[string(p.UID)]; !member && p.Spec.NodeName != "" {
			seen[string(p.UID)] = handover.Member{UID: string(p.UID), Name: p.Name, Node: p.Spec.NodeName}
		}
	}
	pods := map[string]lostPod{}
	for uid, m := range l.seen {
		_, member := state.Members[uid]
		if p := v.Pods.ByUID[uid]; !member && (p == nil || compile.Ended(p)) {
			pods[uid] = lostPod{m, v.now}
		}
	}
	for uid, p := range l.pods {
		if _, again := seen[uid]; !again && !p.over(v) {
			pods[uid] = p
		}
	}
	return lost{seen, pods}
}

// over reports whether a lost pod acts on nothing any more.
func (p lostPod) over(v *view) bool {
	o, policy := v.observe(p.Node, p.UID), v.policy(p.UID)
	if o.Connected {
		return policy.PodPolicy != nil && policy.Refuse != "" && o.Version == policy.Version
	}
	return v.expired(p.since, v.silentSince(o))
}

// members returns the pods to refuse, sorted by uid.
func (l lost) members() []handover.Member {
	return collect.Map(slices.Sorted(maps.Keys(l.pods)), func(uid string) handover.Member { return l.pods[uid].Member })
}

// names describes the pods.
func (l lost) names() []string {
	return collect.Map(l.members(), func(m handover.Member) string {
		return fmt.Sprintf("pod %s on node %s, which was deleted or has exited, and may run on", m.Name, m.Node)
	})
}
