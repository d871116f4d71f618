package status

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/compile/rules"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/text"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/quota"
)

// TrafficInput is the state of the pods that rules apply to.
type TrafficInput struct {
	// Policy returns the policy of a pod, which has the Target's version.
	Policy func(types.UID) *meshv1.PodPolicy
	// Observe returns what the agents of a node reported about a pod.
	Observe func(node, uid string) push.Observation
	Now     time.Time
	// Since is as in Common.
	Since time.Time
}

// target is the status of one pod.
type target struct {
	v1alpha1.TargetStatus
	inForce bool
	reason  v1alpha1.Reason // as in verdict
	why     string          // why the object is not in force in the pod
}

func (t target) broken() bool { return t.reason != "" }

// OfBreaker computes the status of a CircuitBreaker. record is the record of its shares; ok
// is false if the status has no room for it, and then the status keeps the previous record.
func OfBreaker(b compile.Breaker, in TrafficInput, record []v1alpha1.RuleShares, ok bool) v1alpha1.CircuitBreakerStatus {
	if !ok {
		record = b.Status.Shares
	}
	known, shares := byPod(b.Status.TargetStatus), byRule(record)
	targets := collect.Map(b.Targets, func(selected compile.Target) target { return in.breakerTarget(b, selected, known, shares) })
	is := ready(b.Ruling, b.Namespace, targets, "in force")
	if !ok && b.Problem == nil {
		is = condition{false, v1alpha1.ReasonTooManyShares, tooManyShares + "; " + is.message}
	}
	return in.breakerStatus(b.Status, b.Generation, b.Hash, targets, record, is)
}

// breakerStatus returns the status of an object with breakers in some pods.
func (in TrafficInput) breakerStatus(before v1alpha1.CircuitBreakerStatus, generation int64, hash string, targets []target, record []v1alpha1.RuleShares, is condition) v1alpha1.CircuitBreakerStatus {
	out := v1alpha1.CircuitBreakerStatus{
		ObservedGeneration: generation,
		LastUpdatedTime:    before.LastUpdatedTime,
		CurrentSpecHash:    hash,
		Conditions:         slices.Clone(before.Conditions),
		Pods:               int32(len(targets)),
		PodsInForce:        number(targets, target.applies),
		Opened:             number(targets, target.opened),
		TargetStatus:       roomFor(targets, record),
		Shares:             record,
	}
	for _, t := range targets {
		for _, l := range t.LimitingSnapshots {
			out.Refused = plus(out.Refused, l.Refused)
		}
	}
	is.ready(&out.Conditions, generation, in.Now)
	if !equality.Semantic.DeepEqual(before, out) {
		out.LastUpdatedTime = seconds(in.Now)
	}
	return out
}

// breakerTarget returns the status of one pod of a CircuitBreaker.
func (in TrafficInput) breakerTarget(b compile.Breaker, selected compile.Target, known map[string]v1alpha1.TargetStatus, shares map[string]map[string]string) target {
	o := in.Observe(selected.Pod.Spec.NodeName, string(selected.Pod.UID))
	t, was := in.target(b.Ruling, selected, o, known)
	policy := in.Policy(selected.Pod.UID)
	rendered := named(policy.GetTraffic().GetBreakers(), b.Name)
	others := len(rendered.GetIntercepts()) > 0 || slices.ContainsFunc(rendered.GetRules(), func(r *meshv1.LimitRule) bool { return len(r.Http) > 0 })
	t.seesOthers(o, policy, others, rules.Hidden(rendered))
	t.LimitingSnapshots = limiting(rendered, o, was.LimitingSnapshots, shares, selected.Pod.Name)
	return t
}

const tooManyShares = "rules of scope Workload have so many pods that their shares are more than a status has room for, and those that have none yet are refused all requests that the rules match: " +
	"divide the rules, or the pods, among several CircuitBreakers"

// OfInjection computes the status of a FaultInjection. When a spec is first seen, it sets the
// time at which it expires.
func OfInjection(f compile.Injection, in TrafficInput) v1alpha1.FaultInjectionStatus {
	before := f.Status
	out := v1alpha1.FaultInjectionStatus{
		ObservedGeneration: f.Generation,
		LastUpdatedTime:    before.LastUpdatedTime,
		CurrentSpecHash:    f.Hash,
		Conditions:         slices.Clone(before.Conditions),
		Pods:               int32(len(f.Targets)),
	}
	out.ExpirationTime, out.ExpirationGeneration = expiration(f, in.Now)
	known := byPod(before.TargetStatus)
	reported := f.Problem == nil
	if reported && out.ExpirationTime != nil && !in.Now.Before(out.ExpirationTime.Time) {
		// Agents no longer apply the rules, and keep them to report the last counts.
		f.Problem = compile.Expired(f.FaultInjection)
	}
	targets := make([]target, 0, len(f.Targets))
	for _, selected := range f.Targets {
		o := in.Observe(selected.Pod.Spec.NodeName, string(selected.Pod.UID))
		t, was := in.target(f.Ruling, selected, o, known)
		if reported {
			policy := in.Policy(selected.Pod.UID)
			rendered := named(policy.GetTraffic().GetInjections(), f.Name)
			others := slices.ContainsFunc(rendered.GetRules(), func(r *meshv1.FaultRule) bool { return len(r.Http) > 0 })
			t.seesOthers(o, policy, others, rules.HiddenOfFaults(rendered.GetRules()))
			t.FaultSnapshots = faults(rendered, o, was.FaultSnapshots)
		} else {
			t.FaultSnapshots = was.FaultSnapshots // the last counts
		}
		for _, s := range t.FaultSnapshots {
			out.Injected = plus(out.Injected, s.Injected)
		}
		targets = append(targets, t)
	}
	out.PodsInForce = number(targets, target.applies)
	until := "in force until it is deleted"
	if out.ExpirationTime != nil {
		until = "in force until " + out.ExpirationTime.UTC().Format(time.RFC3339)
	}
	ready(f.Ruling, f.Namespace, targets, until).ready(&out.Conditions, f.Generation, in.Now)
	out.TargetStatus = roomFor(targets, nil)
	if !equality.Semantic.DeepEqual(before, out) {
		out.LastUpdatedTime = seconds(in.Now)
	}
	return out
}

// expiration returns when a spec with a duration expires.
func expiration(f compile.Injection, now time.Time) (*metav1.Time, int64) {
	if f.Spec.Duration == nil {
		return nil, 0
	}
	if f.Status.ExpirationGeneration == f.Generation && f.Status.ExpirationTime != nil {
		return f.Status.ExpirationTime, f.Generation
	}
	d, err := time.ParseDuration(string(*f.Spec.Duration))
	if err != nil || d < 0 || f.Problem != nil && f.Problem.Reason == v1alpha1.ReasonInvalid {
		return nil, 0
	}
	return seconds(now.Add(d + time.Second - 1)), f.Generation // never too early
}

func byPod(targets []v1alpha1.TargetStatus) map[string]v1alpha1.TargetStatus {
	out := make(map[string]v1alpha1.TargetStatus, len(targets))
	for _, t := range targets {
		out[t.PodName] = t
	}
	return out
}

// byRule returns the shares of pods by rule and pod.
func byRule(record []v1alpha1.RuleShares) map[string]map[string]string {
	out := map[string]map[string]string{}
	for _, s := range record {
		for _, rule := range s.Rules {
			out[rule] = s.Pods
		}
	}
	return out
}

// target returns the status of one pod, and its previous status.
func (in TrafficInput) target(r compile.Ruling, selected compile.Target, o push.Observation, before map[string]v1alpha1.TargetStatus) (target, v1alpha1.TargetStatus) {
	pod := selected.Pod
	was, known := before[pod.Name]
	t := target{TargetStatus: v1alpha1.TargetStatus{PodName: pod.Name, PodIP: pod.Status.PodIP, ConfigHash: was.ConfigHash}}
	if o.Version != "" && o.Version == selected.Version && !o.NoTraffic && o.TrafficMessage == "" {
		t.ConfigHash = r.Hash
	}
	switch {
	case pod.Annotations[v1alpha1.TrustAnnotation] == "":
		t.reason, t.why = v1alpha1.ReasonNotAdmitted, "it was created while the mesh did not admit pods, and is not captured: delete it, so that its successor is admitted"
	case selected.Message != "":
		t.reason, t.why = v1alpha1.ReasonNoEffect, selected.Message
	case known && unheard(pod, o, in.Now, in.Since) && was.ConfigHash == r.Hash && (was.Message == "" || was.Message == hostsAlone):
	default:
		t.reason, t.why = reach{in.Now, in.Since}.rules(pod, o, selected.Version)
	}
	t.inForce, t.Message = t.why == "" && r.Problem == nil, t.why
	return t, was
}

// rules returns why rules are not in force in a pod, with a reason if that lasts.
func (r reach) rules(pod *corev1.Pod, o push.Observation, wanted string) (v1alpha1.Reason, string) {
	reason, message := r.policy(pod, o, wanted)
	switch {
	case message != "":
	case o.NoTraffic:
		return v1alpha1.ReasonAgentTooOld, fmt.Sprintf("the agent on node %s is too old to know such rules: upgrade DaemonSet ctrlmesh-agent", pod.Spec.NodeName)
	case o.TrafficMessage != "":
		return v1alpha1.ReasonRulesRejected, "its agent could not apply the rules: " + o.TrafficMessage
	}
	return reason, message
}

// seesOthers reports what rules for other hosts lack: redirection, or decrypted https.
func (t *target) seesOthers(o push.Observation, p *meshv1.PodPolicy, others, hidden bool) {
	switch {
	case !t.inForce || !others:
	case o.EgressMessage != "":
		t.inForce, t.reason = false, v1alpha1.ReasonNotRedirected
		t.why = "its connections to other hosts are not redirected: " + o.EgressMessage
		t.Message = t.why
	case hidden && !p.GetTraffic().GetEgress().GetDecrypt():
		t.Message = hostsAlone
	}
}

// hostsAlone is the message about a pod in which a spec is in force for hosts only.
const hostsAlone = "of https only connections to hosts are seen, not the requests in them, so that paths, methods and headers match nothing, limits count connections, and faults affect whole connections: set annotation " + v1alpha1.TrustEgressAnnotation +
	": \"true\" on its template, if its clients may trust the mesh's CA for other hosts"

func (t target) opened() bool {
	return slices.ContainsFunc(t.LimitingSnapshots, func(l v1alpha1.LimitingSnapshot) bool { return l.State != v1alpha1.BreakerClosed })
}

// named returns the first with a name; the zero value if there is none.
func named[T interface{ GetName() string }](in []T, name string) (out T) {
	if i := slices.IndexFunc(in, func(one T) bool { return one.GetName() == name }); i >= 0 {
		out = in[i]
	}
	return out
}

var states = map[meshv1.BreakerState]v1alpha1.BreakerState{
	meshv1.BreakerState_BREAKER_CLOSED:    v1alpha1.BreakerClosed,
	meshv1.BreakerState_BREAKER_OPENED:    v1alpha1.BreakerOpened,
	meshv1.BreakerState_BREAKER_HALF_OPEN: v1alpha1.BreakerHalfOpen,
}

// limiting returns the counts of the rules of a pod. For rules that its agent has not reported
// on, the previous counts apply.
func limiting(b *meshv1.Breaker, o push.Observation, before []v1alpha1.LimitingSnapshot, shares map[string]map[string]string, pod string) []v1alpha1.LimitingSnapshot {
	out := make([]v1alpha1.LimitingSnapshot, 0, len(b.GetRules()))
	for _, r := range b.GetRules() {
		is := v1alpha1.LimitingSnapshot{State: v1alpha1.BreakerClosed}
		if s := o.Rules[r.Key]; s != nil {
			is.State, is.Passed, is.Refused = states[s.State], count(s.Passed), count(s.Refused)
			if s.SinceMs != 0 {
				is.LastTransitionTime = seconds(time.UnixMilli(s.SinceMs))
			}
		} else if i := slices.IndexFunc(before, func(s v1alpha1.LimitingSnapshot) bool { return s.Name == r.Name }); !o.Reported && i >= 0 {
			is = before[i]
		}
		is.Name, is.Share = r.Name, ""
		if r.Share != nil {
			is.Share = cmp.Or(shares[r.Name][pod], quota.Share{}.String())
		}
		out = append(out, is)
	}
	return out
}

func faults(f *meshv1.Injection, o push.Observation, before []v1alpha1.FaultSnapshot) (out []v1alpha1.FaultSnapshot) {
	for _, r := range f.GetRules() {
		is := v1alpha1.FaultSnapshot{}
		i := slices.IndexFunc(before, func(s v1alpha1.FaultSnapshot) bool { return s.Name == r.Name })
		if s := o.Faults[r.Key]; s != nil {
			is.Matched, is.Injected = count(s.Matched), count(s.Injected)
		} else if !o.Reported && i >= 0 {
			is = before[i]
		}
		is.Name = r.Name
		out = append(out, is)
	}
	return out
}

// leaving returns the pods on record that are no longer selected.
func leaving(record []v1alpha1.RuleShares, targets []target) (out []target) {
	said := map[string]bool{}
	for _, t := range targets {
		said[t.PodName] = true
	}
	for _, s := range record {
		for _, pod := range slices.Sorted(maps.Keys(s.Pods)) {
			if !said[pod] {
				said[pod] = true
				out = append(out, target{TargetStatus: v1alpha1.TargetStatus{PodName: pod,
					Message: "it is not selected any more, but may have its share until its agent confirms: others wait for that"}})
			}
		}
	}
	return out
}

// maxSize bounds the record and the targets of a status in bytes, because the object's size is
// bounded. The other sizes are upper bounds on a snapshot, a target and a share on record
// without their names and texts.
const (
	maxSize      = 768 << 10
	snapshotSize = 160
	targetSize   = 160
	shareSize    = len(`"":"",`)
)

// size estimates the size of a target in bytes.
func (t target) size() int {
	n := targetSize + len(t.PodName) + len(t.Message)
	for _, s := range t.LimitingSnapshots {
		n += snapshotSize + len(s.Name) + len(s.Share)
	}
	for _, s := range t.FaultSnapshots {
		n += snapshotSize + len(s.Name)
	}
	return n
}

// roomFor returns as many targets as a status has room for, by name. It prefers those with news.
func roomFor(targets []target, record []v1alpha1.RuleShares) (out []v1alpha1.TargetStatus) {
	all := slices.Concat(targets, leaving(record, targets))
	slices.SortStableFunc(all, func(a, b target) int { return cmp.Compare(a.rank(), b.rank()) })
	room := maxSize
	for _, s := range record {
		for pod, share := range s.Pods {
			room -= len(pod) + len(share) + shareSize
		}
	}
	for _, t := range all[:min(len(all), maxPods)] {
		t.Message = text.Bounded(t.Message, 1<<10)
		if room -= t.size(); room < 0 {
			t.LimitingSnapshots, t.FaultSnapshots = nil, nil
		}
		out = append(out, t.TargetStatus)
	}
	slices.SortFunc(out, func(a, b v1alpha1.TargetStatus) int { return strings.Compare(a.PodName, b.PodName) })
	return out
}

// rank orders targets by news; lower comes first.
func (t target) rank() int {
	switch {
	case !t.inForce:
		return 0
	case t.opened():
		return 1
	}
	return 2
}

// ready returns Ready.
func ready(r compile.Ruling, namespace string, targets []target, inForce string) condition {
	n := int(number(targets, target.applies))
	count := fmt.Sprintf("in force in %d of %d pods", n, len(targets))
	switch {
	case r.Problem != nil && r.Problem.Reason == v1alpha1.ReasonPending && len(r.Problems) == 0:
		return condition{false, v1alpha1.ReasonRollingOut, r.Problem.Message}
	case r.Problem != nil && r.Problem.Reason != v1alpha1.ReasonPending:
		message := r.Problem.Message
		if slices.ContainsFunc(targets, target.late) {
			message += "; " + v1alpha1.EarlierInForce + ": " + describeTargets(targets, target.late)
		}
		return condition{false, r.Problem.Reason, message}
	case len(r.Problems) > 0:
		said := collect.Map(r.Problems, func(p *compile.Problem) string { return p.Message })
		return condition{false, r.Problems[0].Reason, strings.Join(clipped(said), "; ") + "; the rest is " + count}
	case len(targets) == 0:
		return condition{false, v1alpha1.ReasonNoPods, fmt.Sprintf("no pod in namespace %s matches spec.selector and has label %s: \"true\"; set both on the pod template", namespace, v1alpha1.EnableProxyLabel)}
	case n == len(targets):
		message := fmt.Sprintf("%s, in %d pods", inForce, n)
		if alone := number(targets, func(t target) bool { return t.Message == hostsAlone }); alone > 0 {
			message += fmt.Sprintf("; in %d of them %s", alone, hostsAlone)
		}
		return condition{true, v1alpha1.ReasonInForce, message}
	case slices.ContainsFunc(targets, target.broken):
		t := targets[slices.IndexFunc(targets, target.broken)]
		return condition{false, t.reason, count + "; " + describeTargets(targets, target.notInForce)}
	}
	return condition{false, v1alpha1.ReasonRollingOut, count + "; " + describeTargets(targets, target.notInForce)}
}

func number(targets []target, which func(target) bool) int32 {
	return int32(collect.Count(targets, which))
}

func (t target) applies() bool    { return t.inForce }
func (t target) notInForce() bool { return !t.inForce }

// late reports whether the last policy does not apply yet, as far as is known.
func (t target) late() bool {
	return t.why != "" && t.reason != v1alpha1.ReasonNoEffect && t.reason != v1alpha1.ReasonNotAdmitted && t.reason != v1alpha1.ReasonNotCaptured
}

func describeTargets(targets []target, which func(target) bool) string {
	say := func(t target) string { return fmt.Sprintf("pod %s: %s", t.PodName, t.why) }
	return strings.Join(clipped(collect.Map(collect.Filter(targets, which), say)), "; ")
}

// ready sets Ready, with a bounded message.
func (c condition) ready(conditions *[]metav1.Condition, generation int64, now time.Time) {
	c.message = text.Bounded(c.message, 8<<10)
	c.set(conditions, v1alpha1.ConditionReady, generation, now)
}

// seconds returns a time truncated to seconds, as objects contain it.
func seconds(t time.Time) *metav1.Time { return new(metav1.NewTime(t.UTC().Truncate(time.Second))) }

// count returns a number as objects contain it.
func count(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// plus adds without overflow.
func plus(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// CountsAlone reports whether two statuses of a CircuitBreaker differ only in numbers of
// requests.
func CountsAlone(a, b v1alpha1.CircuitBreakerStatus) bool {
	a, b = *a.DeepCopy(), *b.DeepCopy()
	for _, s := range []*v1alpha1.CircuitBreakerStatus{&a, &b} {
		s.LastUpdatedTime, s.Refused = nil, 0
		without(s.TargetStatus)
	}
	return equality.Semantic.DeepEqual(a, b)
}

// FaultCountsAlone is CountsAlone for FaultInjections.
func FaultCountsAlone(a, b v1alpha1.FaultInjectionStatus) bool {
	a, b = *a.DeepCopy(), *b.DeepCopy()
	for _, s := range []*v1alpha1.FaultInjectionStatus{&a, &b} {
		s.LastUpdatedTime, s.Injected = nil, 0
		without(s.TargetStatus)
	}
	return equality.Semantic.DeepEqual(a, b)
}

func without(targets []v1alpha1.TargetStatus) {
	for _, t := range targets {
		for i := range t.LimitingSnapshots {
			t.LimitingSnapshots[i].Passed, t.LimitingSnapshots[i].Refused = 0, 0
		}
		for i := range t.FaultSnapshots {
			t.FaultSnapshots[i].Matched, t.FaultSnapshots[i].Injected = 0, 0
		}
	}
}

// Turn is a breaker of a pod that opened or closed.
type Turn struct {
	Pod, Rule string
	Opened    bool
}

// Turns returns the breakers that opened or closed between two statuses of a CircuitBreaker.
// It omits pods that are in only one of the statuses, unless their breaker opened.
func Turns(before, after []v1alpha1.TargetStatus) (out []Turn) {
	was := map[[2]string]bool{}
	for _, t := range before {
		for _, l := range t.LimitingSnapshots {
			was[[2]string{t.PodName, l.Name}] = l.State != v1alpha1.BreakerClosed
		}
	}
	for _, t := range after {
		for _, l := range t.LimitingSnapshots {
			if is := l.State != v1alpha1.BreakerClosed; is != was[[2]string{t.PodName, l.Name}] {
				out = append(out, Turn{t.PodName, l.Name, is})
			}
		}
	}
	return out
}
