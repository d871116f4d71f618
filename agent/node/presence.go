package node

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
)

// unlistedFor is how long an announced pod is kept though the API does not list it: longer
// than the pod watch takes to notice that it is stale.
const unlistedFor = 2 * time.Minute

// inheritedTrust stands for the trust annotation of a pod that an earlier agent captured,
// and so had been admitted, until the runtime or the API says what it is.
const inheritedTrust = "inherited"

// restore takes up where the last agent of this node stopped, or what the one that still
// runs offers, before the API or the manager have said anything. drained is closed when
// that agent sends nothing any more; nil: it died.
func (n *Node) restore(offered []takeover.Pod, drained <-chan struct{}) {
	cluster, policies, err := n.Store.Load()
	if err != nil {
		n.Logger.Error("some saved policies cannot be used; those pods wait for the manager", "error", err)
	}
	known, err := n.Store.LoadPods()
	if err != nil {
		n.Logger.Error("some saved pods cannot be used; those wait for the API", "error", err)
	}
	if cluster != nil {
		if err := n.setCluster(cluster); err != nil {
			n.Logger.Error("the saved apiserver addresses cannot be used", "error", err)
		}
	}
	for uid, info := range known {
		n.restored(uid, "", "").info = info
	}
	for _, saved := range policies {
		p := n.restored(saved.GetUid(), saved.GetNamespace(), saved.GetName())
		p.policy, p.cachedBy = saved.PodPolicy, saved
		n.handle(saved.GetUid(), p, lifecycle.PolicyRestored)
		p.fence = lifecycle.RestoreFence(saved.PodPolicy)
		if p.rules = saved.InForce; p.rules == nil {
			p.rules = saved.GetTraffic()
		}
	}
	for _, o := range offered {
		p := n.restored(o.UID, o.Namespace, o.Name)
		p.files, p.confirmed, p.counts = o.Files, o.Version, o.Traffic
	}
	for _, p := range n.pods {
		if p.state.Presence == lifecycle.Restored && p.info.Trust == "" {
			p.info.Trust = inheritedTrust
		}
	}
	n.earlier.AddPredecessors(n.policies(), offered, drained, n.started)
	// The listeners of a pod without a process stay open until there is one: connections
	// wait, rather than be refused.
	n.captureMissing()
	n.Logger.Info("restored", "pods", len(n.pods), "handed_over", len(offered), "cluster", cluster != nil)
}

// restored returns the pod that an earlier agent knew.
func (n *Node) restored(uid, namespace, name string) *pod {
	p := n.pods[uid]
	if p == nil {
		p = newPod(pods.Pod{UID: uid, Namespace: namespace, Name: name}, lifecycle.Restored)
		n.pods[uid] = p
	}
	return p
}

// syncPods compares the pods with those that the API lists.
func (n *Node) syncPods() {
	if !n.watcher.Synced() || n.phase == handing || n.phase >= leaving {
		return
	}
	listed := n.watcher.List()
	for uid, info := range listed {
		if !info.Ended {
			n.list(uid, info)
		}
	}
	n.removeAbsent(n.absent(listed))
	if n.phase != serving {
		return
	}
	if err := n.Capture.Sweep(func(uid string) bool { return n.pods[uid] != nil }); err != nil {
		n.Logger.Error("clearing redirections of pods that are gone", "error", err)
	}
}

// list notes that the API lists a pod.
func (n *Node) list(uid string, info pods.Pod) {
	p := n.pods[uid]
	if p == nil {
		p = newPod(info, lifecycle.Listed)
		n.pods[uid] = p
	}
	switch {
	case len(info.Addresses) == 0:
		info.Addresses = p.info.Addresses // the runtime's
	case p.captured != nil:
		if err := p.captured.SetAddresses(info.Addresses); err != nil {
			n.Logger.Error("telling a pod by its addresses", "pod", info.String(), "error", err)
		}
	}
	p.info, p.announced = info, time.Time{}
	p.fresh = p.fresh || info.Created.After(n.started)
	n.handle(uid, p, lifecycle.Listing)
}

// absent returns the uids of the pods that the API should list, and does not.
func (n *Node) absent(listed map[string]pods.Pod) map[string]bool {
	absent := map[string]bool{}
	for uid, p := range n.pods {
		info, ok := listed[uid]
		switch {
		case p.state.Presence == lifecycle.Expected, ok && !info.Ended:
		case !info.Ended && time.Since(p.announced) < unlistedFor: // the runtime was faster
		default:
			absent[uid] = true
		}
	}
	return absent
}

// removeAbsent drops the pods that the API does not list, except those that run on: a
// deletion by force, a stale list, or a removed label ends no process.
func (n *Node) removeAbsent(uids map[string]bool) {
	found, err := n.Locator.Find(uids)
	if err != nil {
		n.Logger.Error("pods that are gone stay captured: the agent needs the node's cgroups and processes (hostPID)", "error", err)
		return
	}
	for uid := range uids {
		p := n.pods[uid]
		if len(found[uid].PIDs) == 0 {
			n.handle(uid, p, lifecycle.Exit)
			continue
		}
		if !p.deleted() {
			n.Logger.Info("a pod that is gone runs on: it is refused", "pod", p.info.String())
		}
		n.handle(uid, p, lifecycle.Absence)
	}
}

// awaitsExit reports whether a deleted pod runs on.
func (n *Node) awaitsExit() bool {
	for _, p := range n.pods {
		if p.deleted() {
			return true
		}
	}
	return false
}
