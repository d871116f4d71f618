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

// inheritedTrust stands for the trust annotation of a pod until the runtime or the API
// reports it. An earlier agent captured the pod, so the pod was admitted.
const inheritedTrust = "inherited"

// presence follows which pods exist.
type presence struct {
	*core
	effects  *effects
	capturer *capturer
	watcher  *pods.Watcher
	started  time.Time
}

// restore continues from the saved state of the last agent of this node, or from what a
// running one offers, before the API or the manager answer. drained is closed when that
// agent sends nothing any more; nil: it died.
func (s *presence) restore(d *destinations, offered []takeover.Pod, drained <-chan struct{}) {
	cluster, policies, err := s.Store.Load()
	s.logError(err, "failed to load some saved policies: those pods wait for the manager", nil)
	known, err := s.Store.LoadPods()
	s.logError(err, "failed to load some saved pods: they wait for the API", nil)
	if cluster != nil {
		s.logError(d.set(cluster), "failed to use the saved addresses of the apiserver", nil)
	}
	for uid, info := range known {
		s.restored(uid, "", "").info = info
	}
	for _, saved := range policies {
		p := s.restored(saved.GetUid(), saved.GetNamespace(), saved.GetName())
		p.assignment.policy, p.assignment.cachedBy = saved.PodPolicy, saved
		s.effects.handle(saved.GetUid(), p, lifecycle.PolicyRestored)
		p.assignment.serials = lifecycle.RestoreSerials(saved.PodPolicy)
		if p.assignment.rules = saved.InForce; p.assignment.rules == nil {
			p.assignment.rules = saved.GetTraffic()
		}
	}
	webhooks, err := s.Store.Webhooks()
	s.logError(err, "failed to load the saved webhooks: reviews are not routed until the manager sends them", nil)
	s.effects.keepWebhooks(webhooks)
	for _, o := range offered {
		p := s.restored(o.UID, o.Namespace, o.Name)
		p.inherited.files, p.assignment.confirmed, p.inherited.counts = o.Files, o.Version, o.Traffic
	}
	for _, p := range s.pods {
		if p.state.Presence == lifecycle.Restored && p.info.Trust == "" {
			p.info.Trust = inheritedTrust
		}
	}
	s.earlier.AddPredecessors(s.policies(), offered, drained, s.started)
	// The listeners of a pod without a process stay open until there is one: connections
	// wait, rather than be refused.
	s.capturer.captureMissing()
	s.Logger.Info("restored", "pods", len(s.pods), "taken_over", len(offered), "cluster", cluster != nil)
}

// restored returns the pod that an earlier agent knew.
func (s *presence) restored(uid, namespace, name string) *pod {
	p := s.pods[uid]
	if p == nil {
		p = newPod(pods.Pod{UID: uid, Namespace: namespace, Name: name}, lifecycle.Restored)
		s.pods[uid] = p
	}
	return p
}

// sync compares the pods with those that the API lists.
func (s *presence) sync() {
	if !s.watcher.Synced() || s.phase == handing || s.phase >= leaving {
		return
	}
	listed := s.watcher.List()
	for uid, info := range listed {
		if !info.Ended {
			s.list(uid, info)
		}
	}
	s.removeAbsent(s.absent(listed))
	if s.phase != serving {
		return
	}
	if s.Inbound != nil {
		s.logError(s.Inbound.Sweep(func(uid string) bool { return s.pods[uid] != nil }), "failed to end the steering to deleted pods", nil)
	}
	s.logError(s.Capture.Sweep(func(uid string) bool { return s.pods[uid] != nil }), "failed to remove the redirections of deleted pods", nil)
}

// list notes that the API lists a pod.
func (s *presence) list(uid string, info pods.Pod) {
	p := s.pods[uid]
	if p == nil {
		p = newPod(info, lifecycle.Listed)
		s.pods[uid] = p
	}
	switch {
	case len(info.Addresses) == 0:
		info.Addresses = p.info.Addresses // the runtime's
	case p.redirection.captured != nil:
		s.logError(p.redirection.captured.SetAddresses(info.Addresses), "failed to identify a pod by its addresses", p)
	}
	p.info, p.announced = info, time.Time{}
	p.assignment.fresh = p.assignment.fresh || info.Created.After(s.started)
	s.effects.handle(uid, p, lifecycle.Listing)
}

// absent returns the uids of the pods that the API should list and does not.
func (s *presence) absent(listed map[string]pods.Pod) map[string]bool {
	absent := map[string]bool{}
	for uid, p := range s.pods {
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
func (s *presence) removeAbsent(uids map[string]bool) {
	found, err := s.Locator.Find(uids)
	if err != nil {
		s.Logger.Error("failed to find pods: deleted ones stay captured, because the agent needs the node's cgroups and processes (hostPID)", "error", err)
		return
	}
	for uid := range uids {
		p := s.pods[uid]
		if len(found[uid].PIDs) == 0 {
			s.effects.handle(uid, p, lifecycle.Exit)
			continue
		}
		if !p.deleted() {
			s.Logger.Info("a deleted pod runs on: its requests are refused", "pod", p.info.String())
		}
		s.effects.handle(uid, p, lifecycle.Absence)
	}
}
