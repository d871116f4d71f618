package explain

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
)

// Limit is the rule of a CircuitBreaker that applies to the request.
type Limit struct {
	Breaker string `json:"circuitBreaker"`
	Rule    string `json:"rule"`
	// State of the breaker, some seconds ago; absent if the status does not show it.
	State   v1alpha1.BreakerState `json:"state,omitempty"`
	Summary string                `json:"summary"`

	refusal *limit.Refusal
}

// Fault is a rule of a FaultInjection that matches the request, and is in force now.
type Fault struct {
	Injection string `json:"faultInjection"`
	Rule      string `json:"rule"`
	// Faults that it may inject, such as "abort 409 (5 %)".
	Faults []string `json:"faults"`
}

// limitsOf returns the rule of each CircuitBreaker that applies to a request that passes isolation.
func limitsOf(s *snapshot.Snapshot, m *meshv1.PodPolicy, d *evaluated) (out []Limit, err error) {
	for _, b := range m.GetTraffic().GetBreakers() {
		applies, err := applying(b, d, s.Now)
		if err != nil {
			return nil, err
		}
		for _, rule := range b.GetRules() {
			if rule.GetName() == applies {
				out = append(out, limitOf(s, m, b, rule))
			}
		}
	}
	return out, nil
}

// applying returns the name of the rule of a CircuitBreaker that applies to a request; empty if none
// does. The proxy's own rules are asked: if all refuse, the one that refuses is the one that applies.
func applying(b *meshv1.Breaker, d *evaluated, now time.Time) (rule string, err error) {
	b = proto.CloneOf(b)
	for _, r := range b.GetRules() {
		r.Trigger = meshv1.Trigger_TRIGGER_FORCE_OPENED
	}
	rules, err := limit.Compile(&meshv1.Traffic{Breakers: []*meshv1.Breaker{b}}, limit.NewStore(), now)
	if err != nil {
		return "", fmt.Errorf("compiling CircuitBreaker %s: %w", b.GetName(), err)
	}
	o := d.x.Object()
	_, refusal := rules.OfKind(d.x.Plan.Key).Take(now, &o, d.x.Req.Header.Get("User-Agent"))
	if refusal == nil {
		return "", nil
	}
	return refusal.Rule, nil
}

// limitOf describes a rule by what the status says of it.
func limitOf(s *snapshot.Snapshot, m *meshv1.PodPolicy, b *meshv1.Breaker, rule *meshv1.LimitRule) Limit {
	out := Limit{Breaker: b.GetName(), Rule: rule.GetName()}
	refuses := func(r limit.Refusal) Limit {
		r.Breaker, r.Rule = out.Breaker, out.Rule
		out.refusal, out.Summary = &r, r.Message(m.GetNamespace())
		return out
	}
	switch rule.GetTrigger() {
	case meshv1.Trigger_TRIGGER_FORCE_OPENED:
		return refuses(limit.Refusal{Opened: true, Reason: "forced"})
	case meshv1.Trigger_TRIGGER_FORCE_CLOSED:
		out.Summary = "its triggerPolicy is ForceClosed: all requests pass"
		return out
	}
	is, found := snapshotOf(s, m, out)
	if !found {
		out.Summary = "its status does not show this pod: " + allowance(rule)
		return out
	}
	out.State = is.State
	open := openOf(s, m, out)
	switch {
	case open != nil && is.State == v1alpha1.BreakerOpened && rule.GetRecovery() == nil:
		return refuses(limit.Refusal{Opened: true, Reason: "opened"})
	case open != nil && open.ClosesAfter != nil:
		return refuses(limit.Refusal{Opened: true, Reason: "opened", RetryAfter: open.ClosesAfter.Sub(s.Now)})
	case open != nil:
		out.Summary = "one trial request passes, and the others get 503; it closes " + open.Closes
	case is.Share == "-":
		return refuses(limit.Refusal{Reason: "bucket", RetryAfter: time.Second})
	default:
		out.Summary = allowance(rule)
	}
	return out
}

// allowance says under which bounds a rule lets requests pass. How much of them is used is known to the
// agent alone.
func allowance(rule *meshv1.LimitRule) string {
	var parts []string
	if b := rule.GetBucket(); b != nil {
		parts = append(parts, fmt.Sprintf("its bucket has tokens (burst %d, %d in %s)", b.GetBurst(), b.GetLimit(), time.Duration(b.GetIntervalNs())))
	}
	if n := rule.GetMaxInFlight(); n > 0 {
		parts = append(parts, fmt.Sprintf("fewer than %d requests are in flight", n))
	}
	if rule.GetBackoff() != nil {
		parts = append(parts, "it does not wait after failed requests")
	}
	if len(parts) == 0 {
		return "requests pass"
	}
	return "requests pass while " + strings.Join(parts, " and ") + "; the agent alone knows how much is used"
}

// snapshotOf returns what the status of a CircuitBreaker says about a rule in the pod.
func snapshotOf(s *snapshot.Snapshot, m *meshv1.PodPolicy, l Limit) (v1alpha1.LimitingSnapshot, bool) {
	for _, b := range s.Subjects.Breakers {
		if b.Namespace != m.GetNamespace() || b.Name != l.Breaker {
			continue
		}
		for _, t := range b.Status.TargetStatus {
			i := slices.IndexFunc(t.LimitingSnapshots, func(is v1alpha1.LimitingSnapshot) bool { return is.Name == l.Rule })
			if t.PodName == m.GetName() && i >= 0 {
				return t.LimitingSnapshots[i], true
			}
		}
	}
	return v1alpha1.LimitingSnapshot{}, false
}

// openOf returns the breaker of a rule in the pod; nil if it is closed.
func openOf(s *snapshot.Snapshot, m *meshv1.PodPolicy, l Limit) *report.OpenBreaker {
	for i := range s.Subjects.Breakers {
		b := &s.Subjects.Breakers[i]
		if b.Namespace != m.GetNamespace() || b.Name != l.Breaker {
			continue
		}
		all, _ := report.OpenOf(b, s.Now)
		for _, o := range all {
			if o.Pod == m.GetName() && o.Rule == l.Rule {
				return &o
			}
		}
	}
	return nil
}

// faultsOf returns the rules of FaultInjections that match a request that passes isolation, with what
// each may inject. The proxy's own rules are asked, one by one and with certain faults.
func faultsOf(s *snapshot.Snapshot, m *meshv1.PodPolicy, d *evaluated) (out []Fault, err error) {
	for _, of := range m.GetTraffic().GetInjections() {
		for _, rule := range of.GetRules() {
			certain := proto.CloneOf(rule)
			certain.Count = 0
			ascertain(certain.ProtoReflect())
			rules, err := fault.Compile(&meshv1.Traffic{
				Injections: []*meshv1.Injection{{Name: of.GetName(), Rules: []*meshv1.FaultRule{certain}, Expires: of.GetExpires()}}, NoFaults: m.GetTraffic().GetNoFaults(),
			}, fault.NewStore(m.GetUid()), s.Now)
			if err != nil {
				return nil, fmt.Errorf("compiling FaultInjection %s: %w", of.GetName(), err)
			}
			o := d.x.Object()
			if injected := rules.OfKind(d.x.Plan.Key).Decide(s.Now, &o); injected != nil {
				out = append(out, Fault{of.GetName(), rule.GetName(), described(rule, injected)})
			}
		}
	}
	return out, nil
}

// described returns texts about the faults that a rule may inject.
func described(rule *meshv1.FaultRule, injected *fault.Faults) (out []string) {
	for _, one := range injected.Injected {
		text := strings.ReplaceAll(one.Kind.String(), "_", " ")
		if one.Kind == fault.Aborted {
			text = fmt.Sprintf("abort %d", rule.GetAbort().GetStatus())
		}
		out = append(out, fmt.Sprintf("%s (%g %%)", text, percentages(rule)[one.Kind]))
	}
	return out
}

// percentages returns the percentages of a rule, by the kind of fault.
func percentages(r *meshv1.FaultRule) map[fault.Kind]float64 {
	return map[fault.Kind]float64{
		fault.Delay:          r.GetDelay().GetPercent(),
		fault.Aborted:        r.GetAbort().GetPercent(),
		fault.Reset:          r.GetReset_().GetPercent(),
		fault.ResetAfter:     r.GetReset_().GetPercent(),
		fault.Truncate:       r.GetTruncate().GetPercent(),
		fault.SlowBody:       r.GetSlowBody().GetPercent(),
		fault.StaleList:      r.GetStaleList().GetPercent(),
		fault.WatchGone:      r.GetWatch().GetGone().GetPercent(),
		fault.WatchCut:       r.GetWatch().GetCut().GetPercent(),
		fault.WatchStall:     r.GetWatch().GetStall().GetPercent(),
		fault.WatchDelay:     r.GetWatch().GetDelay().GetPercent(),
		fault.WatchDuplicate: r.GetWatch().GetDuplicate().GetPercent(),
		fault.WatchDrop:      r.GetWatch().GetDrop().GetPercent(),
	}
}

// ascertain sets all percentages in a message to 100 that are not 0.
func ascertain(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Name() == "percent":
			m.Set(f, protoreflect.ValueOfFloat64(100))
		case f.Message() != nil && !f.IsList():
			ascertain(v.Message())
		}
		return true
	})
}
