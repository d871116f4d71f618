package node

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// captureMissing captures the pods that can be captured and are not.
func (n *Node) captureMissing() {
	missing := map[string]bool{}
	for uid, p := range n.pods {
		if n.uncaptured(p) {
			missing[uid] = true
		}
	}
	n.captureAll(missing, false)
}

// uncaptured reports whether this agent is the one to capture a pod that is not captured.
// While two agents run, both serve the pods in capture mode address.
func (n *Node) uncaptured(p *pod) bool {
	if p.captured != nil || p.state.Presence == lifecycle.Expected {
		return false
	}
	return n.phase == serving || n.phase == yielded && capture.Mode(p.info.Capture) == capture.Address
}

// captureAll captures these pods, as far as their processes are found. starting means that
// no container of them runs yet.
func (n *Node) captureAll(uids map[string]bool, starting bool) {
	for uid := range uids {
		// An earlier problem stays known until the pod is captured.
		if why := n.uncapturable(n.pods[uid]); why != "" {
			n.reportProblem(n.pods[uid], why)
			delete(uids, uid)
		}
	}
	if !n.redirected {
		return // it is not known what to redirect yet
	}
	found, err := n.Locator.Find(uids)
	if err != nil {
		n.Logger.Error("pods that start are not captured: the agent needs the node's cgroups and processes (hostPID)", "error", err)
		return
	}
	for uid := range uids {
		p, f := n.pods[uid], found[uid]
		if len(f.PIDs) == 0 {
			continue
		}
		if capture.Mode(p.info.Capture) == capture.Address && len(p.info.Addresses) == 0 && !starting {
			continue // the API will list the address; a pod that runs could claim another's
		}
		if err := n.capturePod(uid, p, f); err != nil {
			n.reportProblem(p, err.Error())
		}
	}
}

// uncapturable returns why a pod cannot be captured; "" if it can.
func (n *Node) uncapturable(p *pod) string {
	if p.info.Static {
		return "the kubelet runs the pod from a file of its own, where the mesh cannot make it trust the proxy: run it by a DaemonSet"
	}
	if p.info.Trust == "" {
		return "the pod was made before the mesh was there to admit it: delete it, so that its controller makes it anew"
	}
	if p.info.HostNetwork {
		if err := n.Capture.HostNetwork(); err != nil {
			return "the pod uses the node's network, which cannot be captured on this node: " + err.Error()
		}
	}
	return ""
}

// reportProblem notes why a pod is not captured, and reports it once.
func (n *Node) reportProblem(p *pod, why string) {
	if p.problem == why {
		return
	}
	p.problem = why
	n.Logger.Error("capturing a pod", "pod", p.info.String(), "error", why)
	n.Events.Pod(p.info, "NotCaptured", "the mesh does not capture this pod: "+why)
}

// awaitsSandbox reports whether a pod's sandbox is expected any moment.
func (n *Node) awaitsSandbox() bool {
	if !n.redirected {
		return false
	}
	for _, p := range n.pods {
		if n.uncaptured(p) && time.Since(p.since) < eagerFor && n.uncapturable(p) == "" {
			return true
		}
	}
	return false
}

// capturePod redirects a pod whose processes were found, and serves it. It does nothing if
// the pod's network namespace is gone.
func (n *Node) capturePod(uid string, p *pod, f pods.Found) error {
	ns, err := n.Locator.Open(p.info.UID, f.PIDs, p.info.HostNetwork, 0)
	if err != nil || ns == nil {
		return err
	}
	defer ns.Close()
	request := capture.Request{
		UID: p.info.UID, NetNS: ns.Path(), HostNetwork: p.info.HostNetwork, Cgroup: f.Cgroup, Mode: capture.Mode(p.info.Capture),
		Addresses: p.info.Addresses, FailOpen: p.failsOpen(), Files: p.files, Egress: p.egressPorts(),
	}
	start := time.Now()
	p.files = nil // the backend's, whatever it returns
	captured, err := n.Capture.Capture(request)
	if err != nil {
		return err
	}
	p.problem = ""
	if len(p.info.Addresses) == 0 {
		p.info.Addresses = captured.Addresses() // for the next agent
	}
	p.redirection = redirection{captured: captured, netns: ns.Inode, cgroup: request.Cgroup, failOpen: request.FailOpen}
	n.serve(uid, p)
	if n.phase == serving && p.state.Presence != lifecycle.Restored {
		if err := n.Store.SavePod(p.info); err != nil {
			n.Logger.Error("keeping a pod for the next start", "error", err)
		}
	}
	n.Metrics.Captured(time.Since(start))
	n.Logger.Info("captured", "pod", p.info.String(), "uid", p.info.UID, "mode", string(captured.Mode()), "handed_over", request.Files != nil)
	return nil
}

// serve makes the proxy of a captured pod, which begins to accept connections.
func (n *Node) serve(uid string, p *pod) {
	p.journal = n.Journal.Pod(uid)
	p.proxied = n.Proxy.Pod(proxy.PodInfo{
		UID: uid, Namespace: p.info.Namespace, Name: p.info.Name,
		RequireToken: p.captured.Mode() == capture.Address, Traffic: p.rules, Journal: p.journal,
	}, p.captured.DialContext)
	p.applied = proxy.Applied{Settled: p.applied.Settled} // of the proxy before
	n.importCounts(map[string][]byte{uid: p.counts})
	p.counts = nil
	n.handle(uid, p, lifecycle.Capture)
	for _, l := range p.captured.Listeners() {
		go n.accept(p.proxied.Serve, l, "serving a pod", p.info.String())
	}
	go n.watchLocks(uid, p.proxied)
}

// accept serves a listener until it is closed.
func (n *Node) accept(serve func(net.Listener) error, l net.Listener, failure, pod string) {
	if err := serve(l); err != nil && !errors.Is(err, net.ErrClosed) {
		n.Logger.Error(failure, "pod", pod, "error", err)
	}
}

// checkSandboxes releases the captured pods that run in another network namespace and no
// longer in the captured one: their sandbox was replaced. A pod without a process stays
// captured, because it may be between two. The runtime or the pod watch reports pods that
// are gone for good.
func (n *Node) checkSandboxes() {
	captured := map[string]bool{}
	for uid, p := range n.pods {
		if p.captured != nil {
			captured[uid] = true
		}
	}
	n.checkSandboxesOf(captured)
}

func (n *Node) checkSandboxesOf(captured map[string]bool) {
	if n.phase != serving {
		return
	}
	found, err := n.Locator.Find(captured)
	if err != nil {
		n.Logger.Error("a pod with a new sandbox is not captured: the agent needs the node's cgroups and processes (hostPID)", "error", err)
		return
	}
	for uid, f := range found {
		p := n.pods[uid]
		ns, err := n.Locator.Open(uid, f.PIDs, p.info.HostNetwork, p.netns)
		if err != nil {
			n.Logger.Error("looking at a captured pod", "pod", p.info.String(), "error", err)
			continue
		}
		if ns == nil {
			continue
		}
		ns.Close()
		if ns.Inode != p.netns || p.info.HostNetwork && f.Cgroup != p.cgroup {
			n.Logger.Info("the pod has a new sandbox", "pod", p.info.String())
			n.handle(uid, p, lifecycle.SandboxExit)
			p.since, p.fresh = time.Now(), true
		}
	}
}

// release ends the capture of a pod that is gone, or whose sandbox is.
func (n *Node) release(p *pod) {
	takeover.Close([]takeover.Pod{{Files: p.files}})
	p.files = nil
	if p.captured == nil {
		return
	}
	if err := p.captured.Release(); err != nil {
		n.Logger.Error("releasing a pod", "pod", p.info.String(), "error", err)
	}
	proxied := p.proxied
	over, err := proxied.SetPolicy(p.refusal(refusedExited))
	if err == nil {
		n.earlier.Add(p.info.UID, over)
		p.journal.Close()
	}
	if !p.info.HostNetwork {
		time.AfterFunc(shutdownGrace, proxied.Unanswerable)
	}
	go func() { // requests may take a moment to end; no other pod waits for them
		ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
		defer cancel()
		_ = proxied.Shutdown(ctx)
	}()
	p.redirection = redirection{last: over}
}
