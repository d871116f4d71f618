package node

import (
	"bytes"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// part is a part of a report: of the requests of a captured pod.
type part struct {
	// every is the shortest time between two readings, unless the state of the pod changes.
	every time.Duration
	read  func(*proxy.Pod, *meshv1.PodReport)
}

const (
	countInterval    = 2 * time.Second
	activityInterval = 10 * time.Second
	usageInterval    = 15 * time.Second
)

// parts are what a report has beside the state of the pod.
var parts = [...]part{
	{countInterval, func(p *proxy.Pod, r *meshv1.PodReport) {
		r.Rules, r.Faults, r.Methods = p.RuleStates(), p.FaultStates(), p.Methods()
	}},
	{activityInterval, func(p *proxy.Pod, r *meshv1.PodReport) {
		r.Activity, r.Outcomes, r.Shadow = p.Activity(), p.Outcomes(), p.Shadow()
	}},
	{usageInterval, func(p *proxy.Pod, r *meshv1.PodReport) { r.Usage = p.Usage() }},
}

// reading is what was read last, and when.
type reading struct {
	of      *meshv1.PodReport
	encoded []byte
	at      time.Time
}

// note keeps what was read now, and reports whether it is something else than before. To compare
// encodings takes a quarter of proto.Equal.
func (last *reading) note(r *meshv1.PodReport, now time.Time) (changed bool) {
	last.at = now
	encode := proto.MarshalOptions{Deterministic: true}.Marshal
	encoded, err := encode(r)
	if err != nil {
		r = proto.CloneOf(r)
		makeValid(r)
		encoded, err = encode(r)
	}
	if err == nil && bytes.Equal(encoded, last.encoded) {
		return false
	}
	last.of, last.encoded = r, encoded
	return true
}

// reportChanges reports pods that have changed to the manager and the metrics.
func (n *Node) reportChanges() {
	if n.phase >= handing {
		return // the successor reports
	}
	counts, now := map[string]int{}, time.Now()
	for uid, p := range n.pods {
		if p.state.Presence == lifecycle.Expected {
			continue
		}
		state := n.stateOf(uid, p)
		changed := p.read(state, now)
		counts[state.GetCapture()]++
		n.measureRouted(p, state)
		if changed || !p.reporting.reported {
			p.reporting.reported = true
			n.Manager.Report(p.report())
			if s := p.assignment.policy.GetSharding(); len(s.GetLocks()) > 0 {
				n.Metrics.SetLockHolder(p.info.Namespace, p.info.Name, s.GetShard(), state.GetLockHolder())
			}
		}
	}
	n.Metrics.SetPods(counts)
}

// read notes the state of the pod, reads the parts that are due, and reports whether any of that has changed.
func (p *pod) read(state *meshv1.PodReport, now time.Time) (changed bool) {
	isNew := p.reporting.state.note(state, now)
	changed = isNew
	for i, part := range parts {
		last := &p.reporting.parts[i]
		if !isNew && now.Sub(last.at) < part.every {
			continue
		}
		r := &meshv1.PodReport{}
		if p.redirection.captured != nil {
			part.read(p.redirection.proxied, r)
		}
		changed = last.note(r, now) || changed
	}
	return changed
}

// report returns all that was read last.
func (p *pod) report() *meshv1.PodReport {
	r := proto.CloneOf(p.reporting.state.of)
	for _, last := range p.reporting.parts {
		proto.Merge(r, last.of)
	}
	return r
}

// measureRouted records whether the reviews of a pod are routed, if they are to be.
func (n *Node) measureRouted(p *pod, r *meshv1.PodReport) {
	before := p.reporting.routed
	p.reporting.routed = p.redirection.webhook.captured != nil && r.GetWebhookMessage() == ""
	measured := p.reporting.measured
	p.reporting.measured = n.webhooks[p.info.UID] != nil
	if !p.reporting.measured {
		if measured {
			n.Metrics.ForgetRouted(p.info.Namespace, p.info.Name)
		}
		return
	}
	n.Metrics.SetRouted(p.info.Namespace, p.info.Name, before, p.reporting.routed)
}

// stateOf returns the part of a report that the manager is to know at once.
func (n *Node) stateOf(uid string, p *pod) *meshv1.PodReport {
	r := &meshv1.PodReport{Uid: uid, Message: p.problem, DeadHolders: p.reporting.exited}
	if p.redirection.captured == nil {
		return r
	}
	r.Capture = string(p.redirection.captured.Mode())
	r.Version = n.version(p)
	r.LockHolder, r.HeldLocks = p.redirection.proxied.LockHolder(), p.redirection.proxied.HeldLocks()
	r.ObservedLocks = observedLocks(p.redirection.proxied.ObservedLocks())
	r.LockRefusals = lockRefusals(p.redirection.proxied.LockRefusals())
	r.Distrusted = p.redirection.proxied.Distrusted()
	r.EgressMessage = p.redirection.egressProblem
	r.TrafficMessage = p.trafficProblem()
	r.WebhookMessage = n.webhookProblem(p)
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
