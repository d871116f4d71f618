package node

import (
	"context"
	"errors"
	"math"
	"net"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// captureMissing captures the pods that can be and are not.
func (n *Node) captureMissing() {
	missing := map[string]bool{}
	for uid, mb := range n.members {
		if mb.captured == nil && mb.pod.UID != "" && n.mine(mb) {
			missing[uid] = true
		}
	}
	n.captureThese(missing)
}

func (n *Node) captureThese(uids map[string]bool) {
	for uid := range uids {
		// An earlier problem stays known until the pod is captured.
		if why := n.capturable(n.members[uid]); why != "" {
			n.uncaptured(n.members[uid], why)
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
		mb, f := n.members[uid], found[uid]
		if len(f.PIDs) == 0 {
			continue
		}
		if err := n.capturePod(mb, f); err != nil {
			n.uncaptured(mb, err.Error())
		}
	}
}

// uncaptured notes why a pod is not captured, and says it once.
func (n *Node) uncaptured(mb *member, why string) {
	if mb.problem == why {
		return
	}
	mb.problem = why
	n.Logger.Error("capturing a pod", "pod", mb.pod.String(), "error", why)
	n.Events.Pod(mb.pod, "NotCaptured", "the mesh does not capture this pod: "+why)
}

func (n *Node) capturePod(mb *member, f pods.Found) error {
	if capture.Mode(mb.pod.Capture) == capture.Address && len(mb.pod.Addresses) == 0 && !mb.starting {
		return nil // the API will tell; a pod that runs is not asked
	}
	ns, err := n.Locator.Open(mb.pod.UID, f.PIDs, mb.pod.HostNetwork, 0)
	if err != nil || ns == nil {
		return err
	}
	defer ns.Close()
	request := capture.Request{
		UID: mb.pod.UID, NetNS: ns.Path(), HostNetwork: mb.pod.HostNetwork, Cgroup: f.Cgroup, Mode: capture.Mode(mb.pod.Capture),
		Addresses: mb.pod.Addresses, FailOpen: mb.policy.GetFailOpen() && !mb.gone, Handed: mb.handed,
		Egress: portsOf(mb.egressPolicy().GetTraffic(), mb.traffic), // these stay in force if the policy's cannot be
	}
	start := time.Now()
	mb.handed = nil // the backend's, whatever it returns
	captured, err := n.Capture.Capture(request)
	if err != nil {
		return err
	}
	mb.netns, mb.cgroup, mb.captured, mb.failOpen, mb.problem = ns.Inode, request.Cgroup, captured, request.FailOpen, ""
	if len(mb.pod.Addresses) == 0 {
		mb.pod.Addresses = captured.Addresses() // for the next agent
	}
	mb.journal = n.Journal.Pod(mb.pod.UID)
	mb.proxied = n.Proxy.Pod(proxy.PodInfo{
		UID: mb.pod.UID, Namespace: mb.pod.Namespace, Name: mb.pod.Name,
		RequireToken: captured.Mode() == capture.Address, Traffic: mb.traffic, Journal: mb.journal,
	}, captured.DialContext)
	mb.applied = false
	n.recount(map[string][]byte{mb.pod.UID: mb.counted})
	mb.counted = nil
	if err := n.apply(mb); err != nil {
		n.Logger.Error("applying a policy", "pod", mb.pod.String(), "error", err)
	}
	if err := n.keep(mb); err != nil {
		n.Logger.Error("keeping a policy for the next start", "pod", mb.pod.String(), "error", err)
	}
	for _, l := range captured.Listeners() {
		go n.serve(mb.proxied, l, mb.pod)
	}
	go n.watchLocks(mb.pod.UID, mb.proxied)
	if n.phase == serving && !mb.restored {
		if err := n.Store.SavePod(mb.pod); err != nil {
			n.Logger.Error("keeping a pod for the next start", "error", err)
		}
	}
	n.Metrics.Captured(time.Since(start))
	n.Logger.Info("captured", "pod", mb.pod.String(), "uid", mb.pod.UID, "mode", string(captured.Mode()), "handed_over", request.Handed != nil)
	return nil
}

// setEgress redirects the pod's other connections as the rules in force say: what still
// comes in, though the pod has no such rules any more, passes. While not serving, that is
// another's.
func (n *Node) setEgress(mb *member) {
	if mb.captured == nil || n.phase != serving {
		return
	}
	traffic, _ := mb.proxied.Traffic()
	if traffic == nil {
		return // nobody knows what is to be redirected: it stays as the agent before this one left it
	}
	ports := portsOf(traffic)
	listeners, err := mb.captured.SetEgress(ports)
	if err != nil {
		mb.egress = mb.egress && len(ports) > 0 // without ports the listeners are closed all the same
		if why := err.Error(); mb.egressProblem != why {
			mb.egressProblem = why
			n.Logger.Error("redirecting other connections of a pod", "pod", mb.pod.String(), "error", err)
		}
		return
	}
	mb.egressProblem = ""
	if len(listeners) > 0 && !mb.egress {
		for _, l := range listeners {
			go n.serveEgress(mb.proxied, l, mb.pod)
		}
	}
	mb.egress = len(listeners) > 0
}

// portsOf are those of the pod's other connections that are redirected, by any of these rules.
func portsOf(rules ...*meshv1.Traffic) []uint16 {
	var ports []uint16
	for _, t := range rules {
		for _, port := range t.GetEgress().GetPorts() {
			if port > 0 && port <= math.MaxUint16 && !slices.Contains(ports, uint16(port)) {
				ports = append(ports, uint16(port))
			}
		}
	}
	return ports
}

// retryEgress tries again what failed.
func (n *Node) retryEgress() {
	for _, mb := range n.members {
		if mb.egressProblem != "" {
			n.setEgress(mb)
		}
	}
}

func (n *Node) serveEgress(p *proxy.Pod, l net.Listener, pod pods.Pod) {
	if err := p.ServeEgress(l); err != nil && !errors.Is(err, net.ErrClosed) {
		n.Logger.Error("serving other connections of a pod", "pod", pod.String(), "error", err)
	}
}

func (n *Node) serve(p *proxy.Pod, l net.Listener, pod pods.Pod) {
	if err := p.Serve(l); err != nil && !errors.Is(err, net.ErrClosed) {
		n.Logger.Error("serving a pod", "pod", pod.String(), "error", err)
	}
}

// lookAtCaptured releases the pods that are in another network namespace, and no
// longer in the captured one, to be captured anew: their sandbox was replaced. A
// pod that shows no process is left as it is, for it may be between two of them;
// what is gone for good, the runtime or the pod watch tells.
func (n *Node) lookAtCaptured() {
	captured := map[string]bool{}
	for uid, mb := range n.members {
		if mb.captured != nil {
			captured[uid] = true
		}
	}
	n.lookAt(captured)
}

func (n *Node) lookAt(captured map[string]bool) {
	if n.phase != serving {
		return
	}
	found, err := n.Locator.Find(captured)
	if err != nil {
		n.Logger.Error("a pod with a new sandbox is not captured: the agent needs the node's cgroups and processes (hostPID)", "error", err)
		return
	}
	for uid, f := range found {
		mb := n.members[uid]
		ns, err := n.Locator.Open(uid, f.PIDs, mb.pod.HostNetwork, mb.netns)
		if err != nil {
			n.Logger.Error("looking at a captured pod", "pod", mb.pod.String(), "error", err)
			continue
		}
		if ns == nil {
			continue
		}
		ns.Close()
		if ns.Inode != mb.netns || mb.pod.HostNetwork && f.Cgroup != mb.cgroup {
			n.Logger.Info("the pod has a new sandbox", "pod", mb.pod.String())
			n.release(mb)
			mb.since, mb.fresh = time.Now(), true
		}
	}
}

// release ends the capture of a pod that is gone, or whose sandbox is. over is closed when
// nothing that the pod wrote can take effect any more; nil: nothing can.
func (n *Node) release(mb *member) (over <-chan struct{}) {
	takeover.Close([]takeover.Pod{{Handed: mb.handed}})
	mb.handed = nil
	if mb.captured == nil {
		return nil
	}
	if err := mb.captured.Release(); err != nil {
		n.Logger.Error("releasing a pod", "pod", mb.pod.String(), "error", err)
	}
	p := mb.proxied
	over, err := p.SetPolicy(refusal(mb, "the pod has ended"))
	if err == nil {
		n.earlier.add(mb.pod.UID, over)
		mb.journal.Close()
	}
	if !mb.pod.HostNetwork {
		time.AfterFunc(shutdownGrace, p.Unanswerable)
	}
	go func() { // its requests may take a moment to end; no other pod waits for them
		ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
		defer cancel()
		_ = p.Shutdown(ctx)
	}()
	mb.captured, mb.proxied, mb.journal, mb.netns, mb.cgroup = nil, nil, nil, 0, 0
	mb.egress, mb.egressProblem = false, ""
	return over
}
