package node

import (
	"bytes"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"

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

// makeValid replaces what is not UTF-8 in the texts of a report. Pods write some of them, such as the holder of a
// lock. The stream to the manager, which has the reports of all pods, ends at a text that is not UTF-8.
func makeValid(r *meshv1.PodReport) {
	_ = protorange.Range(r.ProtoReflect(), func(at protopath.Values) error {
		in, here := at.Index(-2).Value, at.Index(-1)
		if m, ok := here.Value.Interface().(protoreflect.Map); ok {
			makeKeysValid(m)
			return nil
		}
		text, ok := here.Value.Interface().(string)
		if !ok || utf8.ValidString(text) {
			return nil
		}
		valid := protoreflect.ValueOfString(strings.ToValidUTF8(text, "?"))
		switch here.Step.Kind() {
		case protopath.FieldAccessStep:
			in.Message().Set(here.Step.FieldDescriptor(), valid)
		case protopath.ListIndexStep:
			in.List().Set(here.Step.ListIndex(), valid)
		case protopath.MapIndexStep:
			in.Map().Set(here.Step.MapIndex(), valid)
		}
		return nil
	})
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

func makeKeysValid(m protoreflect.Map) {
	var invalid []protoreflect.MapKey
	m.Range(func(key protoreflect.MapKey, _ protoreflect.Value) bool {
		if text, ok := key.Interface().(string); ok && !utf8.ValidString(text) {
			invalid = append(invalid, key)
		}
		return true
	})
	for _, key := range invalid {
		value := m.Get(key)
		m.Clear(key)
		m.Set(protoreflect.ValueOfString(strings.ToValidUTF8(key.String(), "?")).MapKey(), value)
	}
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
