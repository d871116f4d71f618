package status

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// rulesOn is a CircuitBreaker and a FaultInjection that select pods a and b, and what is
// known of them, which is good.
type rulesOn struct {
	breaker   compile.Breaker
	injection compile.Injection
	policies  map[types.UID]*meshv1.PodPolicy
	says      map[string]push.Observation
	record    []v1alpha1.RuleShares
	in        TrafficInput
}

func rulesOf() *rulesOn {
	r := &rulesOn{policies: map[types.UID]*meshv1.PodPolicy{}, says: map[string]push.Observation{}}
	object := metav1.ObjectMeta{Namespace: "ns", Name: "x", Generation: 3}
	r.breaker = compile.Breaker{CircuitBreaker: &v1alpha1.CircuitBreaker{ObjectMeta: object}, Ruling: compile.Ruling{Hash: "new"}}
	r.injection = compile.Injection{FaultInjection: &v1alpha1.FaultInjection{ObjectMeta: object}, Ruling: compile.Ruling{Hash: "new"}}
	for _, name := range []string{"a", "b"} {
		p := pod(name)
		p.Status.PodIP = "10.0.0.1"
		t := compile.Target{Pod: p, Version: "v2"}
		r.breaker.Targets, r.injection.Targets = append(r.breaker.Targets, t), append(r.injection.Targets, t)
		r.policies[p.UID] = &meshv1.PodPolicy{Version: "v2", Traffic: &meshv1.Traffic{
			Breakers:   []*meshv1.Breaker{{Name: "other"}, {Name: "x", Rules: []*meshv1.LimitRule{{Name: "r", Key: "k"}}}},
			Injections: []*meshv1.Injection{{Name: "x", Rules: []*meshv1.FaultRule{{Name: "f", Key: "kf"}}}},
		}}
		o := fine
		o.Rules = map[string]*meshv1.RuleState{"k": {Key: "k", Passed: 5, Refused: 2}}
		o.Faults = map[string]*meshv1.FaultState{"kf": {Key: "kf", Matched: 6, Injected: 3}}
		r.says[name] = o
	}
	r.in = TrafficInput{
		Policy:  func(uid types.UID) *meshv1.PodPolicy { return r.policies[uid] },
		Observe: func(_, uid string) push.Observation { return r.says[uid] },
		Now:     now, Since: now.Add(-time.Hour),
	}
	return r
}

func (r *rulesOn) say(pod string, change func(*push.Observation)) {
	o := r.says[pod]
	change(&o)
	r.says[pod] = o
}

// statuses are those of both kinds, and their Ready.
func (r *rulesOn) statuses(t *testing.T) (v1alpha1.CircuitBreakerStatus, v1alpha1.FaultInjectionStatus, metav1.Condition, metav1.Condition) {
	t.Helper()
	b, i := OfBreaker(r.breaker, r.in, r.record, true), OfInjection(r.injection, r.in)
	one, other := meta.FindStatusCondition(b.Conditions, v1alpha1.ConditionReady), meta.FindStatusCondition(i.Conditions, v1alpha1.ConditionReady)
	require.NotNil(t, one)
	require.NotNil(t, other)
	require.EqualValues(t, 3, one.ObservedGeneration)
	return b, i, *one, *other
}

func TestRulesInForce(t *testing.T) {
	r := rulesOf()
	since := now.Add(-time.Minute).Add(300 * time.Millisecond)
	r.say("a", func(o *push.Observation) {
		o.Rules = map[string]*meshv1.RuleState{"k": {State: meshv1.BreakerState_BREAKER_HALF_OPEN, SinceMs: since.UnixMilli(), Passed: math.MaxUint64, Refused: math.MaxUint64}}
	})
	b, i, ready, _ := r.statuses(t)
	require.Equal(t, metav1.ConditionTrue, ready.Status)
	require.EqualValues(t, v1alpha1.ReasonInForce, ready.Reason)
	require.Equal(t, []int32{2, 2, 1}, []int32{b.Pods, b.PodsInForce, b.Opened})
	require.EqualValues(t, math.MaxInt64, b.Refused, "as much as there is room for")
	require.Equal(t, "new", b.CurrentSpecHash)
	require.Equal(t, now, b.LastUpdatedTime.Time)
	require.Equal(t, v1alpha1.TargetStatus{PodName: "a", PodIP: "10.0.0.1", ConfigHash: "new", LimitingSnapshots: []v1alpha1.LimitingSnapshot{{
		Name: "r", State: v1alpha1.BreakerHalfOpen, LastTransitionTime: seconds(since), Passed: math.MaxInt64, Refused: math.MaxInt64,
	}}}, b.TargetStatus[0])
	require.Equal(t, v1alpha1.LimitingSnapshot{Name: "r", State: v1alpha1.BreakerClosed, Passed: 5, Refused: 2}, b.TargetStatus[1].LimitingSnapshots[0])

	require.Equal(t, []int32{2, 2}, []int32{i.Pods, i.PodsInForce})
	require.EqualValues(t, 6, i.Injected)
	require.Equal(t, []v1alpha1.FaultSnapshot{{Name: "f", Matched: 6, Injected: 3}}, i.TargetStatus[0].FaultSnapshots)

	// Nothing new later on.
	r.breaker.Status, r.injection.Status = b, i
	r.in.Now = now.Add(time.Minute)
	b2, i2, _, _ := r.statuses(t)
	require.True(t, equality.Semantic.DeepEqual(b, b2))
	require.True(t, equality.Semantic.DeepEqual(i, i2))

	// Numbers only.
	r.say("b", func(o *push.Observation) {
		o.Rules = map[string]*meshv1.RuleState{"k": {Passed: 50, Refused: 2}}
		o.Faults = map[string]*meshv1.FaultState{"kf": {Matched: 60, Injected: 30}}
	})
	b2, i2, _, _ = r.statuses(t)
	require.False(t, equality.Semantic.DeepEqual(b, b2))
	require.Equal(t, r.in.Now, b2.LastUpdatedTime.Time)
	require.True(t, CountsAlone(b, b2))
	require.True(t, FaultCountsAlone(i, i2))
	require.EqualValues(t, 33, i2.Injected)
	r.say("b", func(o *push.Observation) {
		o.Rules = map[string]*meshv1.RuleState{"k": {State: meshv1.BreakerState_BREAKER_OPENED}}
	})
	b3, _, _, _ := r.statuses(t)
	require.False(t, CountsAlone(b, b3))
	require.Equal(t, []Turn{{"b", "r", true}}, Turns(b2.TargetStatus, b3.TargetStatus))
	require.Equal(t, []Turn{{"b", "r", false}}, Turns(b3.TargetStatus, b2.TargetStatus))
}

func TestRulesThatAreNotInForce(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(*rulesOn)
		reason  v1alpha1.Reason
		says    string
		inForce int32
	}{
		{"no pods", func(r *rulesOn) { r.breaker.Targets = nil }, v1alpha1.ReasonNoPods, "ctrlmesh.kusionstack.io/enable-proxy", 0},
		{"invalid", func(r *rulesOn) {
			r.breaker.Problem = &compile.Problem{Reason: v1alpha1.ReasonInvalid, Message: "because"}
		},
			v1alpha1.ReasonInvalid, "because", 0},
		{"an agent of an earlier version", func(r *rulesOn) { r.say("a", func(o *push.Observation) { o.NoTraffic = true }) },
			v1alpha1.ReasonAgentTooOld, "upgrade", 1},
		{"an agent that cannot have them", func(r *rulesOn) {
			r.say("a", func(o *push.Observation) { o.TrafficMessage = "a bucket of 0 ns" })
		},
			v1alpha1.ReasonRulesRejected, "its agent could not apply the rules: a bucket of 0 ns", 1},
		{"partly invalid", func(r *rulesOn) {
			r.breaker.Problems = []*compile.Problem{{Reason: v1alpha1.ReasonInvalid, Message: "because"}}
		}, v1alpha1.ReasonInvalid, "because; the rest is in force in 2 of 2 pods", 2},
		{"disabled", func(r *rulesOn) {
			r.breaker.Problem = &compile.Problem{Reason: v1alpha1.ReasonDisabled, Message: "because"}
		},
			v1alpha1.ReasonDisabled, "because", 0},
		{"disabled, not everywhere yet", func(r *rulesOn) {
			r.breaker.Problem = &compile.Problem{Reason: v1alpha1.ReasonDisabled, Message: "because"}
			r.say("b", func(o *push.Observation) { o.Version = "v1" })
		}, v1alpha1.ReasonDisabled, "may still be in force: pod b", 0},
		{"no effect", func(r *rulesOn) { r.breaker.Targets[0].Message = "passed through" }, v1alpha1.ReasonNoEffect, "pod a: passed through", 1},
		{"not admitted", func(r *rulesOn) { r.breaker.Targets[0].Pod.Annotations = nil }, v1alpha1.ReasonNotAdmitted, "delete it", 1},
		{"starting", func(r *rulesOn) { r.say("b", func(o *push.Observation) { o.Version = "v1" }) }, v1alpha1.ReasonRollingOut, "pod b: its agent does not apply", 1},
		{"pending", func(r *rulesOn) { r.breaker.Targets[0].Pod.Status.Phase = corev1.PodPending }, v1alpha1.ReasonRollingOut, "it is Pending", 1},
		{"no agent", func(r *rulesOn) { r.says["b"] = push.Observation{} }, v1alpha1.ReasonAgentAway, "DaemonSet ctrlmesh-agent", 1},
		{"rejected", func(r *rulesOn) {
			r.say("b", func(o *push.Observation) { o.Version, o.Nacked, o.Nack = "v1", "v2", "too much" })
		}, v1alpha1.ReasonPolicyRejected, "too much", 1},
		{"not captured", func(r *rulesOn) { r.say("a", func(o *push.Observation) { o.Capture, o.Message = "", "no iptables" }) }, v1alpha1.ReasonNotCaptured, "no iptables", 1},
		{"captured by address", func(r *rulesOn) {
			r.policies["a"].Traffic.Breakers[1].Intercepts = []*meshv1.InterceptRule{{Http: []*meshv1.HttpMatch{{}}}}
			r.say("a", func(o *push.Observation) { o.EgressMessage = "captured by address" })
		}, v1alpha1.ReasonNotRedirected, "pod a: its connections to other hosts are not redirected: captured by address", 1},
		{"captured by address, no matter", func(r *rulesOn) {
			r.say("a", func(o *push.Observation) { o.EgressMessage = "captured by address" })
		}, v1alpha1.ReasonInForce, "", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := rulesOf()
			c.change(r)
			b, _, ready, _ := r.statuses(t)
			require.EqualValues(t, c.reason, ready.Reason)
			require.Equal(t, c.reason == v1alpha1.ReasonInForce, ready.Status == metav1.ConditionTrue)
			require.Contains(t, ready.Message, c.says)
			require.Equal(t, c.inForce, b.PodsInForce)
		})
	}
}

// The hash that a pod had stands until the next is in force.
func TestConfigHash(t *testing.T) {
	r := rulesOf()
	r.breaker.Status.TargetStatus = []v1alpha1.TargetStatus{{PodName: "a", ConfigHash: "old"}}
	r.say("a", func(o *push.Observation) { o.Version = "v1" })
	b, _, _, _ := r.statuses(t)
	require.Equal(t, "old", b.TargetStatus[0].ConfigHash)
	require.Equal(t, "new", b.TargetStatus[1].ConfigHash)
}

// Requests within TLS are seen where they may be, and a rule of them gets a note.
func TestHostsAlone(t *testing.T) {
	exact := func(s string) *meshv1.TextMatch { return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: s}} }
	const forced = meshv1.Trigger_TRIGGER_FORCE_OPENED
	for _, c := range []struct {
		match    *meshv1.HttpMatch
		trigger  meshv1.Trigger
		agents   []string
		decrypt  bool
		rendered bool
	}{
		{&meshv1.HttpMatch{Host: exact("h"), Path: exact("/p")}, forced, nil, false, true},
		{&meshv1.HttpMatch{Host: exact("h"), Path: exact("/p")}, forced, nil, true, false},
		{&meshv1.HttpMatch{Methods: []string{"GET"}}, forced, nil, false, true},
		{&meshv1.HttpMatch{Scheme: "http", Path: exact("/p")}, 0, nil, false, false},
		{&meshv1.HttpMatch{Host: exact("h")}, forced, nil, false, false},
		{&meshv1.HttpMatch{Host: exact("h")}, forced, []string{"curl*"}, false, true},
		{&meshv1.HttpMatch{Host: exact("h")}, 0, nil, false, true},
	} {
		r := rulesOf()
		p := r.policies["a"]
		rule := p.Traffic.Breakers[1].Rules[0]
		rule.Http, rule.Trigger, rule.UserAgents = []*meshv1.HttpMatch{c.match}, c.trigger, c.agents
		p.Traffic.Egress = &meshv1.Egress{Decrypt: c.decrypt}
		b, _, ready, _ := r.statuses(t)
		require.Equal(t, metav1.ConditionTrue, ready.Status)
		require.Equal(t, c.rendered, b.TargetStatus[0].Message != "", c.match)
		require.Equal(t, c.rendered, strings.Contains(ready.Message, "https"), ready.Message)
		if c.rendered {
			require.Contains(t, b.TargetStatus[0].Message, v1alpha1.TrustEgressAnnotation)
			require.Contains(t, ready.Message, "in 1 of them of https only connections")
		}
	}
	for rendered, rule := range map[bool]*meshv1.FaultRule{
		true:  {Abort: &meshv1.Abort{Status: 500, Percent: 1}},
		false: {Reset_: &meshv1.Reset{Percent: 1}},
	} {
		r := rulesOf()
		rule.Http = []*meshv1.HttpMatch{{Host: exact("h")}}
		r.policies["a"].Traffic.Injections[0].Rules = []*meshv1.FaultRule{rule}
		_, _, _, ready := r.statuses(t)
		require.Equal(t, rendered, strings.Contains(ready.Message, "in 1 of them of https only connections"), ready.Message)
	}
}

func TestExpiration(t *testing.T) {
	r := rulesOf()
	d := v1alpha1.Duration("90s")
	r.injection.Spec.Duration = &d
	r.in.Now = now.Add(500 * time.Millisecond)
	r.injection.Problem = &compile.Problem{Reason: v1alpha1.ReasonPending, Message: "not yet"}
	_, i, _, ready := r.statuses(t)
	require.Equal(t, now.Add(91*time.Second), i.ExpirationTime.Time, "not a moment too early")
	require.EqualValues(t, 3, i.ExpirationGeneration)
	require.EqualValues(t, v1alpha1.ReasonRollingOut, ready.Reason)

	// It stays.
	r.injection.Status, r.injection.Problem = i, nil
	r.in.Now = now.Add(time.Minute)
	_, i, _, ready = r.statuses(t)
	require.Equal(t, now.Add(91*time.Second), i.ExpirationTime.Time)
	require.EqualValues(t, v1alpha1.ReasonInForce, ready.Reason)
	require.Contains(t, ready.Message, "until 2030-01-01T12:01:31Z")

	// When that has come it is in force in no pod, though agents have yet to report what it
	// did last.
	r.injection.Status = i
	over := r.in
	over.Now = i.ExpirationTime.Time
	r.say("a", func(o *push.Observation) {
		o.Faults = map[string]*meshv1.FaultState{"kf": {Key: "kf", Matched: 6, Injected: 4}}
	})
	last := OfInjection(r.injection, over)
	require.Zero(t, last.PodsInForce)
	require.EqualValues(t, 7, last.Injected)
	require.EqualValues(t, v1alpha1.ReasonExpired, meta.FindStatusCondition(last.Conditions, v1alpha1.ConditionReady).Reason)
	r.say("a", func(o *push.Observation) { o.Faults["kf"].Injected = 3 })

	// What it did is still reported when it has expired.
	r.injection.Status, r.injection.Problem = i, &compile.Problem{Reason: v1alpha1.ReasonExpired, Message: "over"}
	r.policies["a"].Traffic, r.policies["b"].Traffic = nil, nil
	_, i, _, ready = r.statuses(t)
	require.EqualValues(t, v1alpha1.ReasonExpired, ready.Reason)
	require.Zero(t, i.PodsInForce)
	require.EqualValues(t, 6, i.Injected)

	// Another spec lasts anew; without a duration there is no end.
	r.injection.Generation, r.breaker.Generation = 4, 4
	r.injection.Status = i
	require.Equal(t, now.Add(150*time.Second), OfInjection(r.injection, r.in).ExpirationTime.Time)
	r.injection.Spec.Duration = nil
	require.Nil(t, OfInjection(r.injection, r.in).ExpirationTime)
	require.Zero(t, OfInjection(r.injection, r.in).ExpirationGeneration)
	d = "99999999999999h"
	r.injection.Spec.Duration = &d
	require.Nil(t, OfInjection(r.injection, r.in).ExpirationTime)
}

// A status is the record of shares, of pods too that are not selected any more.
func TestSharesOnRecord(t *testing.T) {
	r := rulesOf()
	for _, p := range r.policies {
		p.Traffic.Breakers[1].Rules[0].Share = &meshv1.Share{}
	}
	r.record = []v1alpha1.RuleShares{{Rules: []string{"r"}, Pods: map[string]string{"a": "2/3", "c": "1/3"}}, {Rules: []string{"before"}, Pods: map[string]string{"a": "1/1"}}}
	b, _, _, _ := r.statuses(t)
	require.Equal(t, r.record, b.Shares)
	require.EqualValues(t, 2, b.Pods)
	require.Len(t, b.TargetStatus, 3)
	require.Len(t, b.TargetStatus[0].LimitingSnapshots, 1)
	require.Equal(t, "2/3", b.TargetStatus[0].LimitingSnapshots[0].Share)
	require.Equal(t, "-", b.TargetStatus[1].LimitingSnapshots[0].Share)
	require.Equal(t, "c", b.TargetStatus[2].PodName)
	require.Contains(t, b.TargetStatus[2].Message, "not selected any more")

	// The more so when the rules are being taken away.
	r.breaker.Problem = &compile.Problem{Reason: v1alpha1.ReasonDisabled, Message: "because"}
	r.policies["a"].Traffic, r.policies["b"].Traffic = nil, nil
	b, _, _, _ = r.statuses(t)
	require.Equal(t, r.record, b.Shares)

	// Where there is no room, what was on record stays, and a condition reports it.
	r.breaker.Problem, r.breaker.Status = nil, b
	b = OfBreaker(r.breaker, r.in, nil, false)
	require.Equal(t, r.record, b.Shares)
	ready := meta.FindStatusCondition(b.Conditions, v1alpha1.ConditionReady)
	require.Equal(t, metav1.ConditionFalse, ready.Status)
	require.EqualValues(t, v1alpha1.ReasonTooManyShares, ready.Reason)
	require.Contains(t, ready.Message, "several CircuitBreakers; in force, in 2 pods")
}

// A new leader keeps what the last one wrote until agents had the time to connect and to report.
func TestTrafficOfANewLeader(t *testing.T) {
	r := rulesOf()
	r.breaker.Status, r.injection.Status, _, _ = r.statuses(t)
	r.in.Now, r.in.Since = now.Add(time.Second), now
	for _, connected := range []bool{true, false} {
		r.says["a"] = push.Observation{Connected: connected}
		b, i, ready, _ := r.statuses(t)
		require.Equal(t, metav1.ConditionTrue, ready.Status)
		require.True(t, equality.Semantic.DeepEqual(r.breaker.Status, b))
		require.True(t, equality.Semantic.DeepEqual(r.injection.Status, i))
	}
	r.in.Now = now.Add(2 * Grace)
	b, _, ready, _ := r.statuses(t)
	require.EqualValues(t, v1alpha1.ReasonAgentAway, ready.Reason)
	require.EqualValues(t, 4, b.Refused, "as far as is known")
}

func TestTwoHundredTargets(t *testing.T) {
	r := rulesOf()
	r.breaker.Targets = nil
	for n := range 300 {
		p := pod(fmt.Sprintf("p%03d", n))
		r.breaker.Targets = append(r.breaker.Targets, compile.Target{Pod: p, Version: "v2"})
		r.says[p.Name] = fine
	}
	r.says["p299"] = push.Observation{}
	b, _, ready, _ := r.statuses(t)
	require.EqualValues(t, 300, b.Pods)
	require.EqualValues(t, 299, b.PodsInForce)
	require.Len(t, b.TargetStatus, 200)
	require.Equal(t, "p299", b.TargetStatus[199].PodName)
	require.NotEmpty(t, b.TargetStatus[199].Message)
	require.EqualValues(t, v1alpha1.ReasonAgentAway, ready.Reason)

	// They have so many rules that an object cannot hold all: it names those that opened.
	states := map[string]*meshv1.RuleState{}
	for _, target := range r.breaker.Targets {
		p := &meshv1.PodPolicy{Traffic: &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "x"}}}}
		for i := range 256 {
			p.Traffic.Breakers[0].Rules = append(p.Traffic.Breakers[0].Rules, &meshv1.LimitRule{Name: fmt.Sprint(i), Key: fmt.Sprint(i)})
		}
		r.policies[target.Pod.UID] = p
	}
	states["7"] = &meshv1.RuleState{State: meshv1.BreakerState_BREAKER_OPENED}
	r.say("p298", func(o *push.Observation) { o.Rules = states })
	b, _, _, _ = r.statuses(t)
	require.EqualValues(t, 1, b.Opened)
	require.Len(t, b.TargetStatus, 200)
	require.Equal(t, v1alpha1.BreakerOpened, b.TargetStatus[198].LimitingSnapshots[7].State)
	text, err := json.Marshal(b)
	require.NoError(t, err)
	require.Less(t, len(text), 1<<20)

	// Shares, of which all are on record, take the place of snapshots.
	r.record = []v1alpha1.RuleShares{{Rules: []string{"r"}, Pods: map[string]string{}}}
	for i := range 7000 {
		r.record[0].Pods[fmt.Sprintf("%063d", i)] = "1/7000"
	}
	b, _, _, _ = r.statuses(t)
	require.Len(t, b.Shares[0].Pods, 7000)
	require.Len(t, b.TargetStatus, 200)
	text, err = json.Marshal(b)
	require.NoError(t, err)
	require.Less(t, len(text), 1<<20)
}

// However long names and messages are, the object is no more than can be stored.
func TestTheLargestStatus(t *testing.T) {
	r := rulesOf()
	r.breaker.Targets = nil
	long := func(n, length int) string { return fmt.Sprintf("%0*d", length, n) }
	r.record = []v1alpha1.RuleShares{{Rules: []string{"r"}, Pods: map[string]string{}}}
	for n := range 1900 { // as many as the record may have
		r.record[0].Pods[long(n, 253)] = "1000/1900"
	}
	rendered, states := &meshv1.Breaker{Name: "x"}, map[string]*meshv1.RuleState{}
	for i := range 256 {
		rule := &meshv1.LimitRule{Name: long(i, 63), Key: fmt.Sprint(i), Share: &meshv1.Share{}}
		rendered.Rules = append(rendered.Rules, rule)
		states[rule.Key] = &meshv1.RuleState{State: meshv1.BreakerState_BREAKER_HALF_OPEN, SinceMs: now.UnixMilli(), Passed: math.MaxInt64, Refused: math.MaxInt64}
	}
	for n := range 300 {
		p := pod(long(n, 253))
		r.breaker.Targets = append(r.breaker.Targets, compile.Target{Pod: p, Version: "v2"})
		r.policies[p.UID] = &meshv1.PodPolicy{Version: "v2", Traffic: &meshv1.Traffic{Breakers: []*meshv1.Breaker{rendered}}}
		o := fine
		o.Rules, o.TrafficMessage = states, strings.Repeat("because", 1000)
		r.says[p.Name] = o
	}
	b, _, _, _ := r.statuses(t)
	require.Len(t, b.Shares[0].Pods, 1900)
	require.Len(t, b.TargetStatus, 200)
	text, err := json.Marshal(b)
	require.NoError(t, err)
	require.Less(t, len(text), 1<<20, "and there is a spec")
}

// BenchmarkOfBreaker is of 2000 pods that share 100 rules.
func BenchmarkOfBreaker(b *testing.B) {
	r := rulesOf()
	r.breaker.Targets = nil
	of := v1alpha1.RuleShares{Pods: map[string]string{}}
	for n := range 2000 {
		p := pod(fmt.Sprintf("a-workload-of-some-length-%04d", n))
		r.breaker.Targets = append(r.breaker.Targets, compile.Target{Pod: p, Version: "v2"})
		rendered, o := &meshv1.Breaker{Name: "x"}, fine
		o.Rules = map[string]*meshv1.RuleState{}
		for i := range 100 {
			rule := &meshv1.LimitRule{Name: fmt.Sprint("r", i), Key: fmt.Sprint("k", i), Share: &meshv1.Share{Index: uint32(n), Of: 2000}}
			rendered.Rules = append(rendered.Rules, rule)
			o.Rules[rule.Key] = &meshv1.RuleState{Key: rule.Key, Passed: 1}
			if n == 0 {
				of.Rules = append(of.Rules, rule.Name)
			}
		}
		r.policies[p.UID] = &meshv1.PodPolicy{Version: "v2", Traffic: &meshv1.Traffic{Breakers: []*meshv1.Breaker{rendered}}}
		r.says[p.Name] = o
		of.Pods[p.Name] = fmt.Sprintf("%d/2000", n+1)
	}
	record := []v1alpha1.RuleShares{of}
	for b.Loop() {
		r.breaker.Status = OfBreaker(r.breaker, r.in, record, true)
	}
	text, err := json.Marshal(r.breaker.Status)
	require.NoError(b, err)
	b.ReportMetric(float64(len(text)), "B/status")
}
