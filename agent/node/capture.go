package node

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// capturer captures pods, and follows their sandboxes.
type capturer struct {
	*core
	effects      *effects
	destinations *destinations
}

// captureMissing captures the pods that can be captured and are not.
func (c *capturer) captureMissing() {
	c.captureAll(c.uids(c.uncaptured), false)
}

// uncaptured reports whether the pod is not captured and this agent must capture it.
// While two agents run, both serve the pods in capture mode address.
func (c *capturer) uncaptured(p *pod) bool {
	if p.redirection.captured != nil || p.state.Presence == lifecycle.Expected {
		return false
	}
	return c.phase == serving || c.phase == yielded && capture.Mode(p.info.Capture) == capture.Address
}

// captureAll captures these pods, as far as their processes are found. starting means that
// no container of them runs yet.
func (c *capturer) captureAll(uids map[string]bool, starting bool) {
	for uid := range uids {
		// An earlier problem stays known until the pod is captured.
		if why := c.uncapturable(c.pods[uid]); why != "" {
			c.reportProblem(c.pods[uid], why)
			delete(uids, uid)
		}
	}
	if !c.destinations.redirected {
		return // the addresses to redirect are not known yet
	}
	found, err := c.Locator.Find(uids)
	if err != nil {
		c.Logger.Error("failed to find pods: those that start are not captured, because the agent needs the node's cgroups and processes (hostPID)", "error", err)
		return
	}
	for uid := range uids {
		p, f := c.pods[uid], found[uid]
		if len(f.PIDs) == 0 {
			continue
		}
		if capture.Mode(p.info.Capture) == capture.Address && len(p.info.Addresses) == 0 && !starting {
			continue // the API will list the address; a pod that runs could claim another's
		}
		if err := c.capturePod(uid, p, f); err != nil {
			c.reportProblem(p, err.Error())
		}
	}
}

// uncapturable returns why a pod cannot be captured; "" if it can.
func (c *capturer) uncapturable(p *pod) string {
	if p.info.Static {
		return "the kubelet runs the pod from a file, so the mesh cannot make it trust the proxy: run it by a DaemonSet"
	}
	if p.info.Trust == "" {
		return "the pod was created before the mesh could admit it: delete it, so that its controller creates another"
	}
	if p.info.HostNetwork {
		if err := c.Capture.HostNetwork(); err != nil {
			return "the pod uses the node's network, which cannot be captured on this node: " + err.Error()
		}
	}
	return ""
}

// reportProblem notes why a pod is not captured, and reports it once.
func (c *capturer) reportProblem(p *pod, why string) {
	if p.problem == why {
		return
	}
	p.problem = why
	c.Logger.Error("failed to capture a pod", "pod", p.info.String(), "error", why)
	c.Events.Pod(p.info, "NotCaptured", "the mesh does not capture this pod: "+why)
}

// awaitsSandbox reports whether the sandbox of a pod is expected soon.
func (c *capturer) awaitsSandbox() bool {
	return c.destinations.redirected && len(c.uids(func(p *pod) bool {
		return c.uncaptured(p) && time.Since(p.since) < eagerFor && c.uncapturable(p) == ""
	})) > 0
}

// capturePod redirects a pod whose processes were found, and serves it. It does nothing if
// the pod's network namespace was deleted.
func (c *capturer) capturePod(uid string, p *pod, f pods.Found) error {
	ns, err := c.Locator.Open(p.info.UID, f.PIDs, p.info.HostNetwork, 0)
	if err != nil || ns == nil {
		return err
	}
	defer ns.Close()
	request := capture.Request{
		UID: p.info.UID, NetNS: ns.Path(), HostNetwork: p.info.HostNetwork, Cgroup: f.Cgroup, Mode: capture.Mode(p.info.Capture),
		Addresses: p.info.Addresses, FailOpen: p.failsOpen(), Files: p.inherited.files, Egress: p.egressPorts(),
	}
	start := time.Now()
	if p.inherited.files != nil {
		p.inherited.inbound, p.inherited.files.Inbound = p.inherited.files.Inbound, nil
	}
	p.inherited.files = nil // the backend closes them
	captured, err := c.Capture.Capture(request)
	if err != nil {
		return err
	}
	p.problem = ""
	if len(p.info.Addresses) == 0 {
		p.info.Addresses = captured.Addresses() // for the next agent
	}
	p.redirection = redirection{captured: captured, netns: ns.Inode, process: c.Locator.Hold(ns.PID, ns.Inode), cgroup: request.Cgroup, failOpen: request.FailOpen}
	c.serve(uid, p)
	if c.phase == serving && p.state.Presence != lifecycle.Restored {
		c.logError(c.Store.SavePod(p.info), "failed to save a pod for the next start", p)
	}
	c.Metrics.Captured(time.Since(start))
	c.Logger.Info("captured", "pod", p.info.String(), "uid", p.info.UID, "mode", string(captured.Mode()), "taken_over", request.Files != nil)
	return nil
}

// serve creates the proxy of a captured pod, which begins to accept connections.
func (c *capturer) serve(uid string, p *pod) {
	p.redirection.journal = c.Journal.Pod(uid)
	p.redirection.proxied = c.Proxy.Pod(proxy.PodInfo{
		UID: uid, Namespace: p.info.Namespace, Name: p.info.Name,
		RequireToken: p.redirection.captured.Mode() == capture.Address, Traffic: p.assignment.rules, Journal: p.redirection.journal,
	}, p.redirection.captured.DialContext)
	p.assignment.applied = proxy.Applied{Settled: p.assignment.applied.Settled} // of the proxy before
	c.importCounts(map[string][]byte{uid: p.inherited.counts})
	p.inherited.counts = nil
	c.effects.handle(uid, p, lifecycle.Capture)
	for _, l := range p.redirection.captured.Listeners() {
		go c.effects.accept(p.redirection.proxied.Serve, l, p.info.String())
	}
	go c.watchLocks(uid, p.redirection.proxied)
	c.effects.setWebhook(p)
}

// checkSandboxes releases the captured pods that run in another network namespace and no
// longer in the captured one: their sandbox was replaced. A pod without a process stays
// captured, because it may be between two. The runtime or the pod watch reports pods that
// were deleted. While the process that was found last is in the captured namespace, no other
// is looked for: that would cost most of what an agent with many pods takes at rest.
func (c *capturer) checkSandboxes() {
	var uids []string
	var processes []*pods.Process
	for uid, p := range c.pods {
		if p.redirection.captured != nil {
			uids, processes = append(uids, uid), append(processes, p.redirection.process)
		}
	}
	unsure := map[string]bool{}
	for i, runs := range pods.Running(processes) {
		if !runs || c.pods[uids[i]].info.HostNetwork {
			unsure[uids[i]] = true
		}
	}
	c.checkSandboxesOf(unsure)
}

func (c *capturer) checkSandboxesOf(captured map[string]bool) {
	if c.phase != serving {
		return
	}
	found, err := c.Locator.Find(captured)
	if err != nil {
		c.Logger.Error("failed to find pods: those with a new sandbox are not captured, because the agent needs the node's cgroups and processes (hostPID)", "error", err)
		return
	}
	for uid, f := range found {
		p := c.pods[uid]
		ns, err := c.Locator.Open(uid, f.PIDs, p.info.HostNetwork, p.redirection.netns)
		if err != nil || ns == nil {
			c.logError(err, "failed to check the sandbox of a captured pod", p)
			continue
		}
		ns.Close()
		if ns.Inode != p.redirection.netns || p.info.HostNetwork && f.Cgroup != p.redirection.cgroup {
			c.Logger.Info("the pod has a new sandbox", "pod", p.info.String())
			c.effects.handle(uid, p, lifecycle.SandboxExit)
			p.since, p.assignment.fresh = time.Now(), true
			continue
		}
		if !p.redirection.process.Runs() { // under hostNetwork it may
			p.redirection.process = c.Locator.Hold(ns.PID, ns.Inode)
		}
	}
}

// inCaptured reports whether a process of the pod is in its captured network namespace.
func (c *capturer) inCaptured(p *pod) (bool, error) {
	uid := p.info.UID
	found, err := c.Locator.Find(map[string]bool{uid: true})
	if err != nil {
		return false, err
	}
	ns, err := c.Locator.Open(uid, found[uid].PIDs, p.info.HostNetwork, p.redirection.netns)
	if err != nil || ns == nil {
		return false, err
	}
	defer ns.Close()
	return ns.Inode == p.redirection.netns, nil
}
