package node

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// effects carries out what package lifecycle decides.
type effects struct{ *core }

// setPolicy applies and saves a policy. After an error of the proxy the policy before stays;
// after an error of saving the new one applies. settled is closed once the next agent would
// know the policy, and no write can take effect that earlier policies allowed, in this agent
// or one before it; nil: so it is.
func (e *effects) setPolicy(policy *meshv1.PodPolicy) (settled <-chan struct{}, err error) {
	uid := policy.GetUid()
	p := e.pods[uid]
	if p == nil { // the manager may know a pod before this agent does
		p = newPod(pods.Pod{}, lifecycle.Expected)
		e.pods[uid] = p
	}
	defer func() {
		if err != nil {
			p.reporting.reported = false // the manager no longer knows what applies
		}
	}()
	if err := p.assignment.serials.Check(policy); err != nil {
		return nil, err
	}
	policy = p.withRules(policy)
	if before := p.assignment.policy; before.GetVersion() != policy.GetVersion() && (before.GetSerial() == 0 || before.GetRefuse() != "") {
		p.assignment.confirmed = "" // other policies may have allowed writes before it is wanted again
	}
	if err := e.assign(uid, p, policy); err != nil {
		return nil, err
	}
	settled = p.settled()
	if policy.GetVersion() != p.assignment.confirmed {
		settled = inflight.Both(settled, e.earlier.Over(uid))
	}
	return settled, nil
}

// withRules returns the policy with the traffic rules that apply to the pod. A refusal may
// come without rules. If it has a serial, the pod keeps the rules that it had, else it has none.
func (p *pod) withRules(policy *meshv1.PodPolicy) *meshv1.PodPolicy {
	if policy.GetRefuse() == "" || policy.GetTraffic() != nil {
		return policy
	}
	policy = proto.CloneOf(policy)
	if policy.Traffic = new(meshv1.Traffic); policy.GetSerial() > 0 {
		policy.Traffic = p.refusal("").GetTraffic()
	}
	return policy
}

// assign carries out the effects of a new policy. It stops at the first failure.
func (e *effects) assign(uid string, p *pod, policy *meshv1.PodPolicy) error {
	before, state := p.assignment.policy, p.state
	p.assignment.policy = policy
	var effects []lifecycle.Effect
	p.state, effects = p.state.Next(lifecycle.PolicySet)
	for _, effect := range effects {
		if effect == lifecycle.Save {
			p.assignment.serials.Raise(policy)
		}
		err := e.perform(uid, p, effect)
		switch {
		case err == nil:
		case effect == lifecycle.Save:
			return fmt.Errorf("policy %s is in force, but the next agent would not know: %w", policy.GetVersion(), err)
		default:
			p.assignment.policy, p.state = before, state
			return err
		}
	}
	return nil
}

// removePolicy notes that the manager has no policy for a pod any more.
func (e *effects) removePolicy(uid string) {
	if p := e.pods[uid]; p != nil {
		p.assignment.policy = nil
		e.handle(uid, p, lifecycle.PolicyRemoved)
	}
}

// handle feeds an event to the state machine of a pod and carries out the effects. It logs
// what fails and goes on.
func (e *effects) handle(uid string, p *pod, event lifecycle.Event) {
	var effects []lifecycle.Effect
	p.state, effects = p.state.Next(event)
	for _, effect := range effects {
		e.logError(e.perform(uid, p, effect), failureOf(effect, p), p)
	}
}

// failureOf returns the log message for a failed effect.
func failureOf(effect lifecycle.Effect, p *pod) string {
	switch {
	case effect == lifecycle.RefuseUnassigned:
		return "failed to refuse a pod without a policy"
	case effect == lifecycle.Save && p.assignment.policy == nil:
		return "failed to delete a saved policy"
	case effect == lifecycle.Save:
		return "failed to save a policy for the next start"
	case effect == lifecycle.Forget:
		return "failed to delete the saved state of a deleted pod"
	}
	return "failed to apply a policy"
}

// perform carries out one effect.
func (e *effects) perform(uid string, p *pod, effect lifecycle.Effect) error {
	switch effect {
	case lifecycle.ApplyPolicy:
		return e.applyPolicy(uid, p)
	case lifecycle.RefuseDeleted:
		return e.refuse(p, refusedDeleted)
	case lifecycle.RefuseUnassigned:
		return e.refuse(p, refusedUnassigned)
	case lifecycle.RedirectEgress:
		e.setEgress(p)
	case lifecycle.Save:
		return e.save(p)
	case lifecycle.Release:
		e.release(p)
	case lifecycle.Forget:
		return e.forget(uid, p)
	case lifecycle.Discard:
		e.discard(uid, p)
	}
	return nil
}

// refuse makes the proxy refuse every request of a pod.
func (e *effects) refuse(p *pod, reason string) (err error) {
	if p.assignment.applied, err = p.redirection.proxied.Apply(p.refusal(reason)); err != nil {
		return err
	}
	e.setEgress(p)
	return nil
}

// applyPolicy gives the proxy the policy of the manager.
func (e *effects) applyPolicy(uid string, p *pod) error {
	p.assignment.appliedSince = time.Now()
	if !p.decided() {
		if err := p.restoreCaches(); err != nil {
			return err
		}
	}
	applied, err := p.redirection.proxied.Apply(p.assignment.policy)
	if err != nil {
		return err
	}
	p.assignment.applied, p.assignment.rules = applied, applied.Rules
	e.handle(uid, p, lifecycle.PolicyApplied)
	e.logError(p.assignment.applied.Problem, "rules of a pod are not applied", p)
	e.setEgress(p)
	return nil
}

// restoreCaches gives a new proxy the policy by which the caches of the pod's clients were
// filled, so that they need not list again.
func (p *pod) restoreCaches() error {
	by := p.assignment.cachedBy
	if p.assignment.fresh {
		p.assignment.appliedSince = state.Always
		by = state.Saved{PodPolicy: p.assignment.policy, Since: state.Always}
	}
	if by.PodPolicy == nil {
		return nil
	}
	return p.redirection.proxied.Restore(by.PodPolicy, by.Since)
}

// save stores the pod's failure policy and policy for the next agent. While another agent
// serves, that agent stores them, and the policy counts as saved once it has.
func (e *effects) save(p *pod) error {
	if e.phase != serving {
		p.saved(e.savedByAnother(p))
		return nil
	}
	e.setFailOpen(p)
	err := e.saveAssignment(p)
	p.saved(err == nil && inflight.Closed(p.assignment.successor))
	return err
}

func (e *effects) setFailOpen(p *pod) {
	open := p.failsOpen()
	if p.redirection.captured == nil || p.redirection.failOpen == open {
		return
	}
	err := p.redirection.captured.SetFailOpen(open)
	if err == nil {
		p.redirection.failOpen = open
	}
	e.logError(err, "failed to change the failure policy of a pod", p, "fail_open", open)
}

func (e *effects) saveAssignment(p *pod) error {
	switch {
	case p.assignment.policy == nil && p.assignment.serials.Least == 0 && p.assignment.rules.GetEgress() == nil:
		return e.Store.DeletePolicy(p.info.UID)
	case p.state.Proxy == lifecycle.Waiting:
		return nil // requests get 503, also in the next agent
	}
	return e.Store.SavePolicy(p.record())
}

// record returns what the next agent must know of the pod's policy.
func (p *pod) record() state.Saved {
	saved := state.Saved{PodPolicy: p.assignment.policy, Since: p.assignment.appliedSince}
	if p.assignment.policy == nil {
		saved.PodPolicy = p.refusal(refusedUnassigned)
	} else if t := p.assignment.policy.GetTraffic(); t != nil && t != p.assignment.rules {
		saved.InForce = p.assignment.rules
	}
	if !p.decided() {
		saved.Since = state.NotApplied
	}
	if saved.GetSerial() < p.assignment.serials.Least { // a refusal: it is saved with the least serial
		saved.PodPolicy = proto.CloneOf(saved.PodPolicy)
		saved.Serial = p.assignment.serials.Least
	}
	return saved
}

// savedByAnother reports whether the agent that serves knows the policy that this one has.
func (e *effects) savedByAnother(p *pod) bool {
	if p.assignment.policy == nil {
		return true
	}
	saved, err := e.Store.Policy(p.assignment.policy.GetUid())
	return err == nil && saved.GetVersion() == p.assignment.policy.GetVersion() && saved.GetSerial() >= p.assignment.serials.Least
}

// retry repeats effects that have failed. The first failure was logged.
func (e *effects) retry() {
	for _, p := range e.pods {
		if p.assignment.unsaved != nil {
			_ = e.save(p)
		}
		if p.redirection.egressProblem != "" {
			e.setEgress(p)
		}
	}
}

// forget drops a pod that was deleted.
func (e *effects) forget(uid string, p *pod) (err error) {
	p.saved(true) // nothing acts by its policy any more
	delete(e.pods, uid)
	e.earlier.Deleted(uid, p.info.Namespace)
	e.Manager.Forget(uid)
	e.Metrics.Forget(p.info.Namespace, p.info.Name)
	if e.phase == serving {
		err = e.Store.Delete(uid)
	}
	e.Logger.Info("pod deleted", "pod", p.info.String())
	return err
}

// discard drops the policy of a pod that was never seen on this node.
func (e *effects) discard(uid string, p *pod) {
	delete(e.pods, uid)
	p.saved(true)
	if e.phase != serving {
		return
	}
	e.logError(e.Store.DeletePolicy(uid), "failed to delete a saved policy", nil, "uid", uid)
}

// release ends the capture of a pod that was deleted, or whose sandbox was.
func (e *effects) release(p *pod) {
	p.inherited.files.Close()
	p.inherited.files = nil
	e.endWebhook(p)
	if p.redirection.captured == nil {
		return
	}
	e.logError(p.redirection.captured.Release(), "failed to release a pod", p)
	proxied := p.redirection.proxied
	applied, err := proxied.Apply(p.refusal(refusedExited))
	if err == nil {
		e.earlier.Add(p.info.UID, applied.Settled)
		p.redirection.journal.Close()
	}
	if !p.info.HostNetwork {
		time.AfterFunc(shutdownGrace, proxied.Unanswerable)
	}
	go func() { // requests may take a moment to end; no other pod waits for them
		ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
		defer cancel()
		_ = proxied.Shutdown(ctx)
	}()
	p.redirection = redirection{last: applied.Settled}
}

// version returns the version of the policy that governs everything in progress for a pod,
// in this agent and in those before it. It returns "" if there is none, or if the next agent
// would not know it.
func (c *core) version(p *pod) string {
	policy := p.assignment.policy
	switch {
	case p.assignment.unsaved != nil:
		return ""
	case !c.earlier.Ended(p.info.UID) && (policy.GetSharding() != nil || policy.GetSerial() > 0 || policy.GetRefuse() != ""):
		return p.assignment.confirmed // handovers do not depend on the versions of pods without a shard
	case p.redirection.proxied != nil:
		return p.redirection.proxied.Version()
	}
	return policy.GetVersion()
}

// exportCounts returns the counts of a pod's rules for the next agent.
func (c *core) exportCounts(p *proxy.Pod) []byte {
	if p == nil {
		return nil
	}
	data, err := p.ExportTraffic()
	c.logError(err, "failed to export the counts of rules for the next agent", nil)
	return data
}

// importCounts continues the counts of the pods' rules from those of the predecessor.
func (c *core) importCounts(traffic map[string][]byte) {
	for uid, data := range traffic {
		p := c.pods[uid]
		if p == nil || p.redirection.proxied == nil || len(data) == 0 {
			continue
		}
		c.logError(p.redirection.proxied.ImportTraffic(data), "failed to import the counts of rules: they start at zero", p)
	}
}
