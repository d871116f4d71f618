package node

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
)

// handle feeds an event to the state machine of a pod and carries out the effects. It logs
// what fails and goes on.
func (n *Node) handle(uid string, p *pod, e lifecycle.Event) {
	var effects []lifecycle.Effect
	p.state, effects = p.state.Next(e)
	for _, effect := range effects {
		if err := n.perform(uid, p, effect); err != nil {
			n.Logger.Error(failureOf(effect, p), "pod", p.info.String(), "error", err)
		}
	}
}

// failureOf returns the log message for a failed effect.
func failureOf(effect lifecycle.Effect, p *pod) string {
	switch {
	case effect == lifecycle.RefuseUnassigned:
		return "refusing a pod without a policy"
	case effect == lifecycle.Save && p.policy == nil:
		return "forgetting a policy"
	case effect == lifecycle.Save:
		return "keeping a policy for the next start"
	case effect == lifecycle.Forget:
		return "forgetting a pod that is gone"
	}
	return "applying a policy"
}

// perform carries out one effect.
func (n *Node) perform(uid string, p *pod, effect lifecycle.Effect) error {
	switch effect {
	case lifecycle.ApplyPolicy:
		return n.applyPolicy(uid, p)
	case lifecycle.RefuseDeleted:
		return n.refuse(p, refusedDeleted)
	case lifecycle.RefuseUnassigned:
		return n.refuse(p, refusedUnassigned)
	case lifecycle.RedirectEgress:
		n.setEgress(p)
	case lifecycle.Save:
		return n.save(p)
	case lifecycle.Release:
		n.release(p)
	case lifecycle.Forget:
		return n.forget(uid, p)
	case lifecycle.Discard:
		n.discard(uid, p)
	}
	return nil
}

// refuse makes the proxy refuse every request of a pod.
func (n *Node) refuse(p *pod, reason string) (err error) {
	if p.applied, err = p.proxied.Apply(p.refusal(reason)); err != nil {
		return err
	}
	n.setEgress(p)
	return nil
}

// applyPolicy gives the proxy the policy of the manager.
func (n *Node) applyPolicy(uid string, p *pod) error {
	p.appliedSince = time.Now()
	if !p.decided() {
		if err := p.restoreCaches(); err != nil {
			return err
		}
	}
	applied, err := p.proxied.Apply(p.policy)
	if err != nil {
		return err
	}
	p.applied, p.rules = applied, applied.Rules
	n.handle(uid, p, lifecycle.PolicyApplied)
	if why := p.trafficProblem(); why != "" {
		n.Logger.Error("rules of a pod not applied", "pod", p.info.String(), "error", why)
	}
	n.setEgress(p)
	return nil
}

// restoreCaches tells a new proxy which policy the caches of the pod's clients were filled
// by, so that they need not list again.
func (p *pod) restoreCaches() error {
	by := p.cachedBy
	if p.fresh {
		p.appliedSince = state.Always
		by = state.Saved{PodPolicy: p.policy, Since: state.Always}
	}
	if by.PodPolicy == nil {
		return nil
	}
	return p.proxied.Restore(by.PodPolicy, by.Since)
}

// save makes the pod's failure policy and policy survive this agent. While another agent
// serves, these are its own: the policy counts as saved once the other has saved it.
func (n *Node) save(p *pod) error {
	if n.phase != serving {
		p.saved(n.savedByAnother(p))
		return nil
	}
	n.setFailOpen(p)
	err := n.saveAssignment(p)
	p.saved(err == nil && inflight.Closed(p.successor))
	return err
}

func (n *Node) setFailOpen(p *pod) {
	open := p.failsOpen()
	if p.captured == nil || p.failOpen == open {
		return
	}
	if err := p.captured.SetFailOpen(open); err != nil {
		n.Logger.Error("changing the failure policy of a pod", "pod", p.info.String(), "fail_open", open, "error", err)
		return
	}
	p.failOpen = open
}

func (n *Node) saveAssignment(p *pod) error {
	switch {
	case p.policy == nil && p.fence.Least == 0 && p.rules.GetEgress() == nil:
		return n.Store.DeletePolicy(p.info.UID)
	case p.state.Proxy == lifecycle.Waiting:
		return nil // requests wait, and the next agent lets them wait
	}
	return n.Store.SavePolicy(p.record())
}

// record returns what the next agent must know of the pod's policy.
func (p *pod) record() state.Saved {
	saved := state.Saved{PodPolicy: p.policy, Since: p.appliedSince}
	if p.policy == nil {
		saved.PodPolicy = p.refusal(refusedUnassigned)
	} else if t := p.policy.GetTraffic(); t != nil && t != p.rules {
		saved.InForce = p.rules
	}
	if !p.decided() {
		saved.Since = state.NotApplied
	}
	if saved.GetSerial() < p.fence.Least { // a refusal: it is saved with the least serial
		saved.PodPolicy = proto.CloneOf(saved.PodPolicy)
		saved.Serial = p.fence.Least
	}
	return saved
}

// savedByAnother reports whether the agent that serves knows the policy that this one has.
func (n *Node) savedByAnother(p *pod) bool {
	if p.policy == nil {
		return true
	}
	saved, err := n.Store.Policy(p.policy.GetUid())
	return err == nil && saved.GetVersion() == p.policy.GetVersion() && saved.GetSerial() >= p.fence.Least
}

// saveMissing retries what could not be saved.
func (n *Node) saveMissing() {
	for _, p := range n.pods {
		if p.unsaved != nil {
			_ = n.save(p) // the first failure was logged
		}
	}
}

// forget drops a pod that is gone.
func (n *Node) forget(uid string, p *pod) (err error) {
	p.saved(true) // nothing acts on it any more
	delete(n.pods, uid)
	n.earlier.Deleted(uid, p.info.Namespace)
	n.Manager.Forget(uid)
	n.Metrics.Forget(p.info.Namespace, p.info.Name)
	if n.phase == serving {
		err = n.Store.Delete(uid)
	}
	n.Logger.Info("pod gone", "pod", p.info.String())
	return err
}

// discard drops the policy of a pod that was never seen on this node.
func (n *Node) discard(uid string, p *pod) {
	delete(n.pods, uid)
	p.saved(true)
	if n.phase != serving {
		return
	}
	if err := n.Store.DeletePolicy(uid); err != nil {
		n.Logger.Error("forgetting a policy", "uid", uid, "error", err)
	}
}

// version returns the version of the policy that governs all that is done for a pod, by this
// agent or one before it, and that the next one will know; "" for none.
func (n *Node) version(p *pod) string {
	policy := p.policy
	switch {
	case p.unsaved != nil:
		return ""
	case !n.earlier.Ended(p.info.UID) && (policy.GetSerial() > 0 || policy.GetRefuse() != ""):
		return p.confirmed // else no handover depends on it
	case p.proxied != nil:
		return p.proxied.Version()
	}
	return policy.GetVersion()
}
