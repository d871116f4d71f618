package node

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// reportChanges reports pods that have changed to the manager and the metrics.
func (n *Node) reportChanges() {
	if n.phase >= handing {
		return // the successor reports
	}
	counts := map[string]int{}
	for uid, p := range n.pods {
		if p.state.Presence == lifecycle.Expected {
			continue
		}
		r := n.report(uid, p)
		counts[r.GetCapture()]++
		n.measureRouted(p, r)
		if !proto.Equal(r, p.reporting.reported) {
			p.reporting.reported = r
			n.Manager.Report(r)
			if s := p.assignment.policy.GetSharding(); len(s.GetLocks()) > 0 {
				n.Metrics.SetLockHolder(p.info.Namespace, p.info.Name, s.GetShard(), r.GetLockHolder())
			}
		}
	}
	n.Metrics.SetPods(counts)
}

// measureRouted records whether the reviews of a pod are routed, if they are to be.
func (n *Node) measureRouted(p *pod, r *meshv1.PodReport) {
	before := p.reporting.routed
	p.reporting.routed = p.redirection.webhook.captured != nil && r.GetWebhookMessage() == ""
	if n.webhooks[p.info.UID] == nil {
		n.Metrics.ForgetRouted(p.info.Namespace, p.info.Name)
		return
	}
	n.Metrics.SetRouted(p.info.Namespace, p.info.Name, before, p.reporting.routed)
}

// report returns the present state of a pod.
func (n *Node) report(uid string, p *pod) *meshv1.PodReport {
	r := &meshv1.PodReport{Uid: uid, Message: p.problem, DeadHolders: p.reporting.exited}
	if p.redirection.captured == nil {
		return r
	}
	r.Capture = string(p.redirection.captured.Mode())
	r.Version = n.version(p)
	r.LockHolder, r.HeldLocks = p.redirection.proxied.LockHolder(), p.redirection.proxied.HeldLocks()
	r.ObservedLocks = observedLocks(p.redirection.proxied.ObservedLocks())
	r.LockRefusals = lockRefusals(p.redirection.proxied.LockRefusals())
	r.Methods, r.Distrusted = p.redirection.proxied.Methods(), p.redirection.proxied.Distrusted()
	r.EgressMessage = p.redirection.egressProblem
	r.TrafficMessage = p.trafficProblem()
	r.WebhookMessage = n.webhookProblem(p)
	p.addCounts(r)
	p.addActivity(r, time.Now())
	p.addUsage(r, time.Now())
	return r
}

func observedLocks(locks []lock.Observed) (out []*meshv1.ObservedLock) {
	for _, l := range locks {
		out = append(out, &meshv1.ObservedLock{Namespace: l.Namespace, Name: l.Name, Resource: l.Resource, Holder: l.Holder, Written: l.Written})
	}
	return out
}

func lockRefusals(refusals []lock.Refusal) (out []*meshv1.LockRefusal) {
	for _, r := range refusals {
		out = append(out, &meshv1.LockRefusal{Namespace: r.Namespace, Name: r.Name, Resource: r.Resource, Verb: r.Verb, Code: uint32(r.Code), Message: r.Message})
	}
	return out
}

// countInterval is the shortest time between reports of changed counts alone.
const countInterval = 2 * time.Second

// addCounts adds the counts of rules and faults, as of countInterval ago at most.
func (p *pod) addCounts(r *meshv1.PodReport) {
	if last := p.reporting.reported; last.GetVersion() == r.GetVersion() && last.GetCapture() == r.GetCapture() && time.Since(p.reporting.counted) < countInterval {
		r.Rules, r.Faults = last.GetRules(), last.GetFaults()
		return
	}
	p.reporting.counted = time.Now()
	r.Rules, r.Faults = p.redirection.proxied.RuleStates(), p.redirection.proxied.FaultStates()
}

// activityInterval is the shortest time between reports of changed activity alone.
const activityInterval = 10 * time.Second

// addActivity adds what the pod did to objects, and how its requests ended, as of activityInterval ago at most.
func (p *pod) addActivity(r *meshv1.PodReport, now time.Time) {
	if last := p.reporting.reported; last.GetVersion() == r.GetVersion() && last.GetCapture() == r.GetCapture() && now.Sub(p.reporting.active) < activityInterval {
		r.Activity, r.Outcomes, r.Shadow = last.GetActivity(), last.GetOutcomes(), last.GetShadow()
		return
	}
	p.reporting.active = now
	r.Activity, r.Outcomes, r.Shadow = p.redirection.proxied.Activity(), p.redirection.proxied.Outcomes(), p.redirection.proxied.Shadow()
}

// usageInterval is the shortest time between reports of what a pod requested alone.
const usageInterval = 15 * time.Second

// addUsage adds what the pod requested, as of usageInterval ago at most.
func (p *pod) addUsage(r *meshv1.PodReport, now time.Time) {
	if now.Sub(p.reporting.used) < usageInterval {
		r.Usage = p.reporting.reported.GetUsage()
		return
	}
	if r.Usage = p.redirection.proxied.Usage(); r.Usage != nil {
		p.reporting.used = now
	}
}
