package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/control"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func (n *Node) setCluster(c *meshv1.Cluster) error {
	destinations, err := parseAddresses(c.GetServiceAddresses(), c.GetEndpointAddresses())
	if err != nil {
		return fmt.Errorf("apiserver address: %w", err)
	}
	if len(destinations) == 0 {
		return errors.New("the manager named no apiserver address")
	}
	agents, err := parseAddresses(c.GetAgentAddresses())
	if err != nil {
		return fmt.Errorf("agent address: %w", err)
	}
	if err := n.Proxy.SetCluster(c); err != nil {
		return err
	}
	if n.cluster != nil && !sameLeaf(n.cluster, c) {
		n.RenewLeaf()
	}
	n.cluster, n.destinations, n.agents, n.redirected = c, destinations, agents, false
	return n.keepCluster()
}

// redirect tells the capture what to redirect, if it does not know yet.
func (n *Node) redirect() error {
	if n.redirected || n.cluster == nil || n.phase != serving {
		return nil
	}
	if err := n.Capture.SetDestinations(n.destinations, n.agents); err != nil {
		return fmt.Errorf("redirecting to the apiserver's addresses: %w", err)
	}
	n.redirected = true
	return nil
}

func parseAddresses(lists ...[]string) ([]netip.AddrPort, error) {
	var parsed []netip.AddrPort
	for _, s := range slices.Concat(lists...) {
		a, err := netip.ParseAddrPort(s)
		if err != nil {
			return nil, err
		}
		parsed = append(parsed, a)
	}
	return parsed, nil
}

// sameLeaf says whether a serving certificate that was signed under a is right
// under b.
func sameLeaf(a, b *meshv1.Cluster) bool {
	return a.GetMeshCa() == b.GetMeshCa() &&
		slices.Equal(a.GetServiceAddresses(), b.GetServiceAddresses()) &&
		slices.Equal(a.GetEndpointAddresses(), b.GetEndpointAddresses()) &&
		slices.Equal(a.GetAgentAddresses(), b.GetAgentAddresses())
}

// apply puts what is wanted of a member in force, in this agent. A pod that is here
// without a policy is refused, not let through.
func (n *Node) apply(mb *member) error {
	if mb.proxied == nil {
		return nil // applied when the pod is captured
	}
	refuse := func(why string) (err error) {
		p := refusal(mb, why)
		if mb.settled, err = mb.proxied.SetPolicy(p); err != nil {
			return err
		}
		n.setEgress(mb)
		return nil
	}
	switch {
	case mb.gone:
		return refuse("this pod was deleted, or has ended, or left the mesh, and runs on")
	case mb.policy == nil && !mb.applied:
		return nil // it may have yet to come
	case mb.policy == nil:
		return refuse(noPolicy)
	}
	mb.inForce = time.Now()
	if !mb.applied {
		// What the pod's clients hold need not be listed again if it was filled
		// under this policy.
		filled := mb.saved
		if mb.fresh {
			mb.inForce = state.Always
			filled = state.Saved{PodPolicy: mb.policy, Since: mb.inForce}
		}
		if filled.PodPolicy != nil {
			if err := mb.proxied.Restore(filled.PodPolicy, filled.Since); err != nil {
				return err
			}
		}
	}
	settled, err := mb.proxied.SetPolicy(mb.policy)
	if err != nil {
		return err
	}
	mb.applied, mb.settled = true, settled
	mb.traffic, _ = mb.proxied.Traffic()
	if why := mb.trafficProblem(); why != "" {
		n.Logger.Error("rules of a pod not applied", "pod", mb.pod.String(), "error", why)
	}
	n.setEgress(mb)
	return nil
}

// trafficProblem is why the rules of the policy cannot be, if so, and what holds instead.
func (mb *member) trafficProblem() string {
	if mb.proxied != nil && mb.applied {
		if _, err := mb.proxied.Traffic(); err != nil {
			return err.Error()
		}
	}
	return ""
}

const noPolicy = "the mesh has no policy for this pod any more"

// refusal is a policy that refuses everything, which is within what the pod's own
// allows, whichever it is. Its connections to other hosts are held to the rules that
// they were held to: without rules they would be free. Its shares others have by now.
func refusal(mb *member, why string) *meshv1.PodPolicy {
	traffic := mb.traffic
	if !mb.applied && mb.policy != nil {
		traffic = mb.policy.GetTraffic()
	}
	traffic = proto.CloneOf(traffic)
	for _, b := range traffic.GetBreakers() {
		for _, r := range b.GetRules() {
			if r.GetShare() != nil {
				r.Share = &meshv1.Share{}
			}
		}
	}
	return &meshv1.PodPolicy{
		Uid: mb.pod.UID, Namespace: mb.pod.Namespace, Name: mb.pod.Name, Version: mb.policy.GetVersion(), Refuse: why,
		Traffic: traffic,
	}
}

// keep sees to what of a member outlives this agent: what becomes of the pod
// without one, and the policy for the next. While not serving, that is another's:
// then the policy counts as saved once the other has saved it. An error says that it
// could not be.
func (n *Node) keep(mb *member) error {
	if n.phase != serving {
		mb.known(n.savedByAnother(mb))
		return nil
	}
	open := mb.policy.GetFailOpen() && !mb.gone
	if mb.captured != nil && mb.failOpen != open {
		if err := mb.captured.SetFailOpen(open); err != nil {
			n.Logger.Error("changing the failure policy of a pod", "pod", mb.pod.String(), "fail_open", open, "error", err)
		} else {
			mb.failOpen = open
		}
	}
	var err error
	switch {
	case mb.policy == nil && mb.floor == 0 && mb.traffic.GetEgress() == nil:
		err = n.Store.DeletePolicy(mb.pod.UID)
	case mb.proxied == nil || mb.applied:
		saved := state.Saved{PodPolicy: mb.policy, Since: mb.inForce}
		if mb.policy == nil {
			saved.PodPolicy = refusal(mb, noPolicy)
		} else if t := mb.policy.GetTraffic(); t != nil && t != mb.traffic {
			saved.InForce = mb.traffic
		}
		if !mb.applied {
			saved.Since = state.NotApplied
		}
		if saved.GetSerial() < mb.floor { // a refusal: on disk its serial is the floor
			saved.PodPolicy = proto.CloneOf(saved.PodPolicy)
			saved.Serial = mb.floor
		}
		err = n.Store.SavePolicy(saved)
	}
	mb.known(err == nil && done(mb.successor))
	return err
}

// savedByAnother says whether the agent that serves knows what this one was told.
func (n *Node) savedByAnother(mb *member) bool {
	if mb.policy == nil {
		return true
	}
	saved, err := n.Store.Policy(mb.policy.GetUid())
	return err == nil && saved.GetVersion() == mb.policy.GetVersion() && saved.GetSerial() >= mb.floor
}

// known notes whether the agent after this one would know what is in force.
func (mb *member) known(yes bool) {
	switch {
	case yes && mb.unsaved != nil:
		close(mb.unsaved)
		mb.unsaved = nil
	case !yes && mb.unsaved == nil:
		mb.unsaved = make(chan struct{})
	}
}

// keepCluster is keep for what all members share.
func (n *Node) keepCluster() error {
	if n.phase != serving || n.cluster == nil {
		return nil
	}
	if err := n.Store.SaveCluster(n.cluster); err != nil {
		n.Logger.Error("keeping the apiserver's addresses for the next start", "error", err)
	}
	return n.redirect()
}

// handler brings the messages of the manager into the loop.
type handler struct {
	ctx context.Context
	*Node
}

// Policies returns the handler of the manager's messages. Its methods fail once ctx ends.
func (n *Node) Policies(ctx context.Context) control.Handler { return handler{ctx, n} }

func (h handler) SetCluster(c *meshv1.Cluster) error {
	return h.do(h.ctx, func() error {
		if err := h.setCluster(c); err != nil {
			return err
		}
		h.captureMissing()
		return nil
	})
}

func (h handler) SetPolicy(p *meshv1.PodPolicy) (settled <-chan struct{}, err error) {
	err = h.do(h.ctx, func() error {
		mb := h.members[p.GetUid()]
		if mb == nil {
			// The manager may hear of a pod before this agent does.
			mb = &member{since: time.Now()}
			h.members[p.GetUid()] = mb
		}
		if err := mb.bars(p); err != nil {
			return err
		}
		if p.GetRefuse() != "" && p.GetTraffic() == nil {
			p = proto.CloneOf(p)
			if p.Traffic = new(meshv1.Traffic); p.GetSerial() > 0 {
				// The manager knows no more of the pod than that it is gone. If it runs
				// on, it is held to what it was held to, or nobody knows to what.
				p.Traffic = refusal(mb, "").GetTraffic()
			}
		}
		before := mb.policy
		if before.GetVersion() != p.GetVersion() && (before.GetSerial() == 0 || before.GetRefuse() != "") {
			mb.confirmed = "" // it may be wanted again, after what came between
		}
		mb.policy = p
		if err := h.apply(mb); err != nil {
			mb.policy = before
			return err
		}
		mb.raise(p)
		if err := h.keep(mb); err != nil {
			return fmt.Errorf("policy %s is in force, but the next agent would not know: %w", p.GetVersion(), err)
		}
		settled = both(mb.settled, mb.unsaved)
		if p.GetVersion() != mb.confirmed {
			settled = both(settled, h.earlier[p.GetUid()])
		}
		return nil
	})
	return settled, err
}

func (h handler) TrafficProblem(uid string) (why string) {
	_ = h.do(h.ctx, func() error {
		if mb := h.members[uid]; mb != nil {
			why = mb.trafficProblem()
		}
		return nil
	})
	return why
}

// bars says why a pod that has been told what this one has must not act on p, if so.
func (mb *member) bars(p *meshv1.PodPolicy) error {
	required := p.GetRequiredSerial()
	switch {
	case required > 0 && (mb.floor > mb.serial || required > mb.serial) && p.GetRefuse() == "":
		return fmt.Errorf("policy %s is for a pod that has had serial %d and was not refused since: to this agent it is none", p.GetVersion(), required)
	case p.GetRefuse() != "" || p.GetSerial() >= mb.floor:
		return nil
	case p.GetSerial() == 0:
		return fmt.Errorf("policy %s: the pod was a member of a root's shard, and is served under no other configuration: delete the pod, so that its controller makes it anew", p.GetVersion())
	}
	return fmt.Errorf("policy %s has serial %d, and the pod may act on %d or later: it comes from a manager that leads no more", p.GetVersion(), p.GetSerial(), mb.floor)
}

// raise notes that the pod has had p. A refusal bars all that the pod has had before, so
// that no policy which comes late undoes it.
func (mb *member) raise(p *meshv1.PodPolicy) {
	mb.serial = max(mb.serial, p.GetSerial())
	least := mb.serial
	if least > 0 && p.GetRefuse() != "" {
		least++
	}
	mb.floor = max(mb.floor, least)
}

func (h handler) Serial(uid string) (serial uint64, barred bool) {
	_ = h.do(h.ctx, func() error {
		if mb := h.members[uid]; mb != nil {
			serial, barred = mb.serial, mb.floor > mb.serial
		}
		return nil
	})
	return serial, barred
}

func (h handler) RemovePolicy(uid string) (settled <-chan struct{}, err error) {
	err = h.do(h.ctx, func() error {
		h.removePolicy(uid)
		settled = h.earlier[uid]
		if mb := h.members[uid]; mb != nil {
			settled = both(settled, both(mb.settled, mb.unsaved))
		}
		return nil
	})
	return settled, err
}

func (h handler) Synced(uids map[string]bool) {
	_ = h.do(h.ctx, func() error {
		for uid, mb := range h.members {
			if !uids[uid] && mb.policy != nil {
				h.removePolicy(uid)
			}
		}
		return nil
	})
}

func (h handler) Namespaces() map[string]string {
	namespaces := map[string]string{}
	_ = h.do(h.ctx, func() error {
		maps.Copy(namespaces, h.ended)
		for uid, mb := range h.members {
			namespaces[uid] = cmp.Or(mb.pod.Namespace, mb.policy.GetNamespace())
		}
		return nil
	})
	return namespaces
}

func (h handler) Versions() map[string]string {
	versions := map[string]string{}
	_ = h.do(h.ctx, func() error {
		for uid := range h.earlier {
			versions[uid] = "" // it is gone, and its writes may go on
		}
		for uid, mb := range h.members {
			versions[uid] = h.version(mb)
		}
		return nil
	})
	return versions
}

// removePolicy leaves a pod that is still here without a policy.
func (n *Node) removePolicy(uid string) {
	mb := n.members[uid]
	if mb == nil {
		return
	}
	if mb.pod.UID == "" {
		delete(n.members, uid) // never seen on this node
		mb.known(true)
		if n.phase == serving {
			if err := n.Store.DeletePolicy(uid); err != nil {
				n.Logger.Error("forgetting a policy", "uid", uid, "error", err)
			}
		}
		return
	}
	mb.policy = nil
	if err := n.apply(mb); err != nil {
		n.Logger.Error("refusing a pod without a policy", "pod", mb.pod.String(), "error", err)
	}
	if err := n.keep(mb); err != nil {
		n.Logger.Error("forgetting a policy", "pod", mb.pod.String(), "error", err)
	}
}
