package node

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// unseenFor is how long a pod that the runtime told of is kept though the pod
// watch does not show it: longer than the watch takes to notice that it is stale.
const unseenFor = 2 * time.Minute

// member is a labelled pod of this node.
type member struct {
	pod      pods.Pod
	since    time.Time
	restored bool      // from an earlier agent, not yet seen in the API
	told     time.Time // by the runtime, not yet seen in the API
	gone     bool      // from the API, while its processes run
	policy   *meshv1.PodPolicy

	// What the caches of the pod's clients were filled under: saved, unless this
	// agent was there from the pod's start, when there are none.
	fresh bool
	saved state.Saved

	netns    uint64 // inode of the captured network namespace
	cgroup   uint64 // of the pod, under hostNetwork
	sandbox  string // the runtime's name of it; "" while that is not known for certain
	starting bool   // no container of it runs yet
	handed   *capture.Handed
	counted  []byte // by rules, under the agent before this one
	captured *capture.Pod
	failOpen bool // captured knows
	proxied  *proxy.Pod
	journal  *journal.Pod    // of proxied
	applied  bool            // proxied has had a policy
	traffic  *meshv1.Traffic // in force, here or under the agent before; nil: nobody knows
	inForce  time.Time       // since when the policy is
	floor    uint64          // the least serial of a policy that it may act on
	serial   uint64          // the highest of a policy that it has had
	settled  <-chan struct{} // closed when what earlier policies let through is over
	unsaved  chan struct{}   // closed when the next agent knows the policy in force; nil: it does
	problem  string          // why it is not captured
	// successor is closed when nothing takes effect any more that a successor which
	// failed let through, before the policy in force was saved; nil: nothing does.
	successor <-chan struct{}

	egress        bool   // its other connections are served
	egressProblem string // why they are not redirected as they should be

	// What the agent before this one had confirmed, which holds for all that it has
	// under way.
	confirmed string

	// dead are the last writes of the pod's locks, if the processes that wrote them are proven to have
	// ended and nothing of his is under way.
	dead     []*meshv1.DeadHolder
	reported *meshv1.PodReport
	ruled    time.Time // when the report's rules and faults were looked at
}

// egressPolicy is what says where the pod's other connections go.
func (mb *member) egressPolicy() *meshv1.PodPolicy {
	if mb.gone || mb.policy == nil {
		return refusal(mb, noPolicy)
	}
	return mb.policy
}

// syncPods brings members in step with the pod watch.
func (n *Node) syncPods() {
	if !n.watcher.Synced() || n.phase == handing || n.phase >= leaving {
		return
	}
	seen := n.watcher.List()
	for uid, pod := range seen {
		if pod.Ended {
			continue
		}
		mb := n.members[uid]
		if mb == nil {
			mb = &member{since: time.Now()}
			n.members[uid] = mb
		}
		switch {
		case len(pod.Addresses) == 0:
			pod.Addresses = mb.pod.Addresses // the runtime's word
		case mb.captured != nil:
			if err := mb.captured.SetAddresses(pod.Addresses); err != nil {
				n.Logger.Error("telling a pod by its addresses", "pod", pod.String(), "error", err)
			}
		}
		mb.pod, mb.restored, mb.told = pod, false, time.Time{}
		mb.fresh = mb.fresh || pod.Created.After(n.started)
		if mb.gone { // the apiserver that said so was behind
			n.disown(mb, false)
		}
	}
	away := map[string]bool{}
	for uid, mb := range n.members {
		if pod, ok := seen[uid]; ok && !pod.Ended || mb.pod.UID == "" {
			continue // without a uid: a policy that came before the pod was seen
		}
		if !seen[uid].Ended && time.Since(mb.told) < unseenFor {
			continue // the runtime was faster than the API
		}
		away[uid] = true
	}
	n.dropThose(away)
	if n.phase != serving {
		return
	}
	if err := n.Capture.Sweep(func(uid string) bool { return n.members[uid] != nil }); err != nil {
		n.Logger.Error("clearing redirections of pods that are gone", "error", err)
	}
}

// dropThose drops the pods that are gone from the API, but for those that run on: a
// deletion by force, a list that is behind, or a label that was removed ends no
// process. They are refused while they do, whatever their failure policy: others may own
// their keys by then.
func (n *Node) dropThose(uids map[string]bool) {
	found, err := n.Locator.Find(uids)
	if err != nil {
		n.Logger.Error("pods that are gone stay captured: the agent needs the node's cgroups and processes (hostPID)", "error", err)
		return
	}
	for uid := range uids {
		mb := n.members[uid]
		if len(found[uid].PIDs) == 0 {
			n.drop(uid, mb)
		} else if !mb.gone {
			n.Logger.Info("a pod that is gone runs on: it is refused", "pod", mb.pod.String())
			n.disown(mb, true)
		}
	}
}

// disown notes whether a pod that runs is gone from the API.
func (n *Node) disown(mb *member, gone bool) {
	mb.gone = gone
	if err := n.apply(mb); err != nil {
		n.Logger.Error("applying a policy", "pod", mb.pod.String(), "error", err)
	}
	if err := n.keep(mb); err != nil {
		n.Logger.Error("keeping a policy for the next start", "pod", mb.pod.String(), "error", err)
	}
}

// keepUnsaved tries again to save what could not be.
func (n *Node) keepUnsaved() {
	for _, mb := range n.members {
		if mb.unsaved != nil {
			_ = n.keep(mb) // which failed before, and was told
		}
	}
}

// lateEnds says whether the end of a pod that is gone is waited for.
func (n *Node) lateEnds() bool {
	for _, mb := range n.members {
		if mb.gone {
			return true
		}
	}
	return false
}

func (n *Node) drop(uid string, mb *member) {
	n.release(mb)
	mb.known(true) // nothing acts on it any more
	delete(n.members, uid)
	if !done(n.earlier[uid]) {
		n.ended[uid] = mb.pod.Namespace
	}
	n.Manager.Forget(uid)
	n.Metrics.Forget(mb.pod.Namespace, mb.pod.Name)
	if n.phase == serving {
		if err := n.Store.Delete(uid); err != nil {
			n.Logger.Error("forgetting a pod that is gone", "pod", mb.pod.String(), "error", err)
		}
	}
	n.Logger.Info("pod gone", "pod", mb.pod.String())
}

// capturable says why a pod cannot be captured; "" when it can.
func (n *Node) capturable(mb *member) string {
	if mb.pod.Static {
		return "the kubelet runs the pod from a file of its own, where the mesh cannot make it trust the proxy: run it by a DaemonSet"
	}
	if mb.pod.Trust == "" && !mb.restored {
		return "the pod was made before the mesh was there to admit it: delete it, so that its controller makes it anew"
	}
	if mb.pod.HostNetwork {
		if err := n.Capture.HostNetwork(); err != nil {
			return "the pod uses the node's network, which cannot be captured on this node: " + err.Error()
		}
	}
	return ""
}

// mine says whether a pod is this agent's to capture. While two agents run, both
// serve the pods that know them by address.
func (n *Node) mine(mb *member) bool {
	return n.phase == serving || n.phase == yielded && capture.Mode(mb.pod.Capture) == capture.Address
}

// waiting says whether a pod's sandbox is expected any moment.
func (n *Node) waiting() bool {
	if !n.redirected {
		return false
	}
	for _, mb := range n.members {
		if mb.captured == nil && mb.pod.UID != "" && n.mine(mb) && time.Since(mb.since) < eagerFor && n.capturable(mb) == "" {
			return true
		}
	}
	return false
}
