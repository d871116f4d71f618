package compile

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

func limits(t *testing.T, uid types.UID) (Rules, []*corev1.Pod, func(Rules) map[string]*meshv1.LimitRule) {
	t.Helper()
	_, pods, _, rules := read(t, "testdata/traffic.in.yaml")
	for i, c := range rules.Breakers {
		rules.Breakers[i] = c.DeepCopy()
	}
	return rules, pods, func(r Rules) map[string]*meshv1.LimitRule {
		out := map[string]*meshv1.LimitRule{}
		for _, b := range Compile(nil, pods, nil, r).Policies[uid].Traffic.GetBreakers() {
			for _, l := range b.Rules {
				out[b.Name+"/"+l.Name] = l
			}
		}
		return out
	}
}

func named(rules Rules, name string) *v1alpha1.CircuitBreaker {
	for _, c := range rules.Breakers {
		if c.Name == name {
			return c
		}
	}
	return nil
}

// What a rule has counted is kept while the rule is as it was.
func TestKeysFollowRules(t *testing.T) {
	rules, _, rendered := limits(t, "uid-operator-0")
	before := rendered(rules)
	require.Len(t, before, 5)

	c := named(rules, "limits")
	c.Annotations[v1alpha1.RecoverAnnotation] = strings.Repeat("4", 10000)
	rules.Share = func(breaker types.NamespacedName, rule, pod string, uid types.UID) *meshv1.Share {
		require.Equal(t, "ns/limits together", breaker.String()+" "+rule)
		return &meshv1.Share{Index: 1, Of: 2}
	}
	after := rendered(rules)
	for name, rule := range before {
		require.Equal(t, rule.Key, after[name].Key, name)
	}
	require.NotEqual(t, before["limits/pods"].Recover, after["limits/pods"].Recover)
	require.Less(t, len(after["limits/pods"].Recover), 64)
	require.EqualValues(t, 2, after["limits/together"].Share.Of)
	require.Nil(t, after["limits/pods"].Share)

	// One rule is changed, and all are written in another order.
	c.Spec.RateLimitings[0].Bucket.Burst++
	c.Spec.RateLimitings[0], c.Spec.RateLimitings[1] = c.Spec.RateLimitings[1], c.Spec.RateLimitings[0]
	changed := rendered(rules)
	for name, rule := range after {
		if name == "limits/pods" {
			require.NotEqual(t, rule.Key, changed[name].Key)
		} else {
			require.Equal(t, rule.Key, changed[name].Key, name)
		}
	}

	// An object of the same name is another one.
	c.UID = "another"
	require.NotEqual(t, changed["limits/together"].Key, rendered(rules)["limits/together"].Key)
}

func TestRulesOfSomePodsAreMoreSpecific(t *testing.T) {
	rules, _, rendered := limits(t, "uid-operator-0")
	first := &named(rules, "limits").Spec.RateLimitings[0]
	first.PodSelector = &metav1.LabelSelector{}
	require.False(t, rendered(rules)["limits/"+first.Name].SomePods, "it says nothing")
	first.PodSelector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "absent", Operator: metav1.LabelSelectorOpDoesNotExist}}
	require.True(t, rendered(rules)["limits/"+first.Name].SomePods)
}

// Rules that do not select a pod change nothing of its policy.
func TestPodsWithoutRulesKeepTheirPolicy(t *testing.T) {
	_, pods, _, rules := read(t, "testdata/traffic.in.yaml")
	with, without := Compile(nil, pods, nil, rules), Compile(nil, pods, nil, Rules{})
	require.Equal(t, without.Policies["uid-exempt"].Version, with.Policies["uid-exempt"].Version)
	require.Nil(t, with.Policies["uid-exempt"].Traffic)
	require.NotEqual(t, without.Policies["uid-operator-0"].Version, with.Policies["uid-operator-0"].Version)
	require.NotContains(t, with.Policies, types.UID("uid-unlabelled"))
}

// Together, rules may be more than an agent would take.
func TestRulesExceedPolicySize(t *testing.T) {
	rules, pods, _ := limits(t, "")
	large := named(rules, "limits")
	long := large.Spec.RateLimitings[0].DeepCopy()
	for range 64 {
		long.UserAgents = append(long.UserAgents, strings.Repeat("a", 10000))
	}
	large.Spec.RateLimitings[0] = *long
	other := large.DeepCopy()
	other.Name = "other"
	rules.Breakers = append(rules.Breakers, other)
	r := Compile(nil, pods, nil, rules)
	for _, b := range r.Breakers {
		for _, target := range b.Targets {
			require.Equal(t, b.Name == "other", strings.Contains(target.Message, "exceeds the size of a policy"), b.Name)
		}
	}
	require.Len(t, r.Policies["uid-operator-0"].Traffic.Breakers, 3)
}

// What is not validated has as much effect as it can, and never stops the manager.
func TestEmptySpecs(t *testing.T) {
	pods := []*corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "1", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"}}}}
	all := &metav1.LabelSelector{}
	r := Compile(nil, pods, nil, Rules{
		Breakers: []*v1alpha1.CircuitBreaker{
			{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "nil"}},
			{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "zero"}, Spec: v1alpha1.CircuitBreakerSpec{Selector: all, RateLimitings: []v1alpha1.Limiting{{}}}},
			{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "list"}, Spec: v1alpha1.CircuitBreakerSpec{Selector: all, TrafficInterceptRules: []v1alpha1.TrafficInterceptRule{{InterceptType: v1alpha1.InterceptWhitelist, Contents: []string{"("}, ContentType: v1alpha1.ContentRegexp}}}},
		},
		Injections: []*v1alpha1.FaultInjection{
			{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "nil"}},
			{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "zero"}, Spec: v1alpha1.FaultInjectionSpec{Selector: all, HTTPFaultInjections: []v1alpha1.HTTPFaultInjection{{}, {Delay: &v1alpha1.FaultDelay{}}}}},
		},
	})
	rendered := r.Policies["1"].Traffic
	require.Len(t, rendered.Breakers, 1)
	require.Empty(t, rendered.Breakers[0].Intercepts[0].Http, "a whitelist that cannot be read allows nothing")
	require.True(t, rendered.Breakers[0].RefuseUnseen)
	require.EqualValues(t, v1alpha1.ReasonInvalid, r.Injections[0].Problem.Reason)
	require.NotEmpty(t, r.Injections[1].Problems)
}

// Of what trusts the egress CA only by its own word, nothing is decrypted.
func TestOnlyWhatWasGivenTheCAIsDecrypted(t *testing.T) {
	rules, pods, _ := limits(t, "")
	decrypts := func() bool {
		return Compile(nil, pods, nil, rules).Policies["uid-operator-0"].Traffic.Egress.Decrypt
	}
	require.True(t, decrypts())
	for _, p := range pods {
		delete(p.Annotations, v1alpha1.EgressTrustAnnotation)
	}
	require.False(t, decrypts())
}

// What many objects ask of one pod is bounded, and said of those that are left out.
func TestBoundsOfOnePod(t *testing.T) {
	for name, c := range map[string]struct {
		object func(i int) v1alpha1.CircuitBreakerSpec
		fit    int
		says   string
	}{
		"rules": {func(int) (s v1alpha1.CircuitBreakerSpec) {
			for i := range 256 {
				s.RateLimitings = append(s.RateLimitings, v1alpha1.Limiting{Name: fmt.Sprint(i), MaxInFlight: new(int32(1)),
					NonResourceRules: []v1alpha1.NonResourceRule{{NonResourceURLs: []string{"*"}, Verbs: []string{"*"}}}})
			}
			return s
		}, 4, "1280 rules"},
		"expressions": {func(int) (s v1alpha1.CircuitBreakerSpec) {
			s.TrafficInterceptRules = []v1alpha1.TrafficInterceptRule{{Name: "r", ContentType: v1alpha1.ContentRegexp, Contents: slices.Repeat([]string{"/(?:.*a){13}"}, 5)}}
			return s
		}, 2, "regular expressions"},
		"ports": {func(n int) (s v1alpha1.CircuitBreakerSpec) {
			s.TrafficInterceptRules = []v1alpha1.TrafficInterceptRule{{Name: "r", Contents: []string{"a.example.com"}}}
			s.Egress = &v1alpha1.EgressConfig{}
			for i := range 32 {
				s.Egress.Ports = append(s.Egress.Ports, int32(1+32*n+i))
			}
			return s
		}, 2, "redirects 96 ports"},
	} {
		t.Run(name, func(t *testing.T) {
			var rules Rules
			for i := range c.fit + 1 {
				b := &v1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint(i), UID: types.UID(fmt.Sprint(i))}, Spec: c.object(i)}
				b.Spec.Selector = &metav1.LabelSelector{}
				require.Empty(t, BreakerProblems(b))
				rules.Breakers = append(rules.Breakers, b)
			}
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "p", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"}}}
			r := Compile(nil, []*corev1.Pod{pod}, nil, rules)
			require.Len(t, r.Policies["p"].Traffic.Breakers, c.fit)
			for i, b := range r.Breakers {
				require.Equal(t, i == c.fit, b.Targets[0].Message != "", b.Targets[0].Message)
			}
			require.Contains(t, r.Breakers[c.fit].Targets[0].Message, c.says)
		})
	}
}

func TestTheFirstObjectsOfANamespaceHaveEffect(t *testing.T) {
	rules := Rules{Now: time.Now()}
	for i := range maxObjects + 1 {
		meta := metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprintf("%04d", i), UID: types.UID(fmt.Sprint(i))}
		b := &v1alpha1.CircuitBreaker{ObjectMeta: meta}
		b.Spec.Selector = &metav1.LabelSelector{}
		b.Spec.RateLimitings = []v1alpha1.Limiting{{Name: "r", MaxInFlight: new(int32(1)),
			NonResourceRules: []v1alpha1.NonResourceRule{{NonResourceURLs: []string{"*"}, Verbs: []string{"*"}}}}}
		rules.Breakers = append(rules.Breakers, b)
		f := &v1alpha1.FaultInjection{ObjectMeta: meta}
		f.Spec.Selector = &metav1.LabelSelector{}
		rules.Injections = append(rules.Injections, f)
	}
	for _, b := range rules.Breakers[:10] { // which takes no place from others
		idle := b.DeepCopy()
		idle.Name, idle.UID, idle.Spec.Disabled = "0-"+b.Name, "idle-"+b.UID, true
		rules.Breakers = append(rules.Breakers, idle)
	}
	elsewhere := *rules.Breakers[maxObjects]
	elsewhere.Namespace, elsewhere.UID = "other", "other"
	rules.Breakers = append(rules.Breakers, &elsewhere)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "p", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"}}}
	r := Compile(nil, []*corev1.Pod{pod}, nil, rules)
	require.Len(t, r.Policies["p"].Traffic.Breakers, maxObjects)
	for i, b := range r.Breakers[:10] {
		require.Equal(t, v1alpha1.ReasonDisabled, b.Problem.Reason, i)
		require.Len(t, b.Targets, 1)
	}
	for i, b := range r.Breakers[10 : 10+maxObjects+1] {
		require.Equal(t, i < maxObjects, b.Problem == nil)
		require.Equal(t, i < maxObjects, len(b.Targets) == 1)
	}
	require.Nil(t, r.Breakers[10+maxObjects+1].Problem, "it is in another namespace")
	require.Contains(t, r.Injections[maxObjects].Problem.Message, "more than 256 FaultInjections")
}

// A change of the spec lets faults go on until it is written down when it ends.
func TestFaultsGoOnWhileTheyAreEdited(t *testing.T) {
	now := time.Now()
	f := &v1alpha1.FaultInjection{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "f", UID: "f", Generation: 2}}
	f.Spec = v1alpha1.FaultInjectionSpec{Selector: &metav1.LabelSelector{}, Duration: new(v1alpha1.Duration("1h")),
		HTTPFaultInjections: []v1alpha1.HTTPFaultInjection{{Name: "r", Reset: &v1alpha1.FaultReset{Percent: "1"}}}}
	problem := func() *Problem {
		return Compile(nil, nil, nil, Rules{Injections: []*v1alpha1.FaultInjection{f}, Now: now}).Injections[0].Problem
	}
	require.EqualValues(t, v1alpha1.ReasonPending, problem().Reason)
	f.Status.ExpirationGeneration, f.Status.ExpirationTime = 1, &metav1.Time{Time: now.Add(time.Minute)}
	require.Nil(t, problem())
	f.Status.ExpirationTime = &metav1.Time{Time: now}
	require.EqualValues(t, v1alpha1.ReasonPending, problem().Reason)
	f.Status.ExpirationGeneration = 2
	require.Nil(t, problem(), "what it did last is not reported yet")
	f.Status.ExpirationTime = &metav1.Time{Time: now.Add(-lastReport)}
	require.EqualValues(t, v1alpha1.ReasonExpired, problem().Reason)
}

// Agents have the rules of a FaultInjection for a moment after it expired.
func TestAgentsCanReportWhatFaultsDidLast(t *testing.T) {
	end := time.Now().Truncate(time.Second)
	f := &v1alpha1.FaultInjection{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "f", UID: "f"}}
	f.Spec = v1alpha1.FaultInjectionSpec{Selector: &metav1.LabelSelector{}, Duration: new(v1alpha1.Duration("1h")),
		HTTPFaultInjections: []v1alpha1.HTTPFaultInjection{{Name: "r", Reset: &v1alpha1.FaultReset{Percent: "1"}}}}
	f.Status.ExpirationTime = &metav1.Time{Time: end}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "p", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"}}}
	at := func(now time.Time) Result {
		return Compile(nil, []*corev1.Pod{pod}, nil, Rules{Injections: []*v1alpha1.FaultInjection{f}, Now: now})
	}
	r := at(end.Add(lastReport - 1))
	require.Equal(t, end.Unix(), r.Policies["p"].Traffic.Injections[0].Expires)
	require.Equal(t, end.Add(lastReport), r.Until)
	r = at(r.Until)
	require.Nil(t, r.Policies["p"].Traffic)
	require.Zero(t, r.Until)
}

// Not every pod needs a rule, but one.
func TestBreakerOfNoPodHasNoEffect(t *testing.T) {
	var pods []*corev1.Pod
	for _, tier := range []string{"one", "two"} {
		pods = append(pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: tier, UID: types.UID(tier), Labels: map[string]string{v1alpha1.EnableProxyLabel: "true", "tier": tier},
		}})
	}
	c := &v1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
	c.Spec.Selector = &metav1.LabelSelector{}
	messages := func() string {
		targets := Compile(nil, pods, nil, Rules{Breakers: []*v1alpha1.CircuitBreaker{c}}).Breakers[0].Targets
		require.Equal(t, targets[0].Message, targets[1].Message)
		return targets[0].Message
	}
	require.Contains(t, messages(), "none of its rules")
	c.Spec.RateLimitings = []v1alpha1.Limiting{{
		Name: "some", TriggerPolicy: v1alpha1.TriggerForceOpened, RestRules: []v1alpha1.RestRule{{URL: "*"}},
		PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "three"}},
	}}
	require.Contains(t, messages(), "none of its rules")
	c.Spec.RateLimitings[0].PodSelector.MatchLabels["tier"] = "two"
	require.Empty(t, messages())
}

// A breaker that selects pods but has no rule for them gets a note.
func TestAnInjectionWithoutRulesHasNoEffect(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "pod", UID: "1", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"},
	}}
	empty := &v1alpha1.FaultInjection{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "empty"}}
	empty.Spec.Selector = &metav1.LabelSelector{}
	r := Compile(nil, []*corev1.Pod{pod}, nil, Rules{Injections: []*v1alpha1.FaultInjection{empty}})
	require.Contains(t, r.Injections[0].Targets[0].Message, "none of its rules")
}

// Who is refused at the apiserver, or passes it unread, reaches no more of other hosts than
// before, and has no share of what it cannot use.
func TestRulesAboutOtherHostsHoldWhateverBecomesOfThePod(t *testing.T) {
	all := &metav1.LabelSelector{}
	deletes := []v1alpha1.ResourceRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"delete"}, Namespaces: []string{"*"}}}
	hosts := []v1alpha1.RestRule{{URL: "https://api.example.com"}}
	rule := func(name string, deletes []v1alpha1.ResourceRule, hosts []v1alpha1.RestRule) v1alpha1.Limiting {
		return v1alpha1.Limiting{Name: name, ResourceRules: deletes, RestRules: hosts, MaxInFlight: new(int32(1)), Scope: v1alpha1.LimitScopeWorkload}
	}
	breaker := func(name string, rules ...v1alpha1.Limiting) *v1alpha1.CircuitBreaker {
		return &v1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)},
			Spec: v1alpha1.CircuitBreakerSpec{Selector: all, RateLimitings: rules}}
	}
	injection := func(name string, matches ...*v1alpha1.FaultMatch) *v1alpha1.FaultInjection {
		f := &v1alpha1.FaultInjection{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)}, Spec: v1alpha1.FaultInjectionSpec{Selector: all}}
		for i, m := range matches {
			f.Spec.HTTPFaultInjections = append(f.Spec.HTTPFaultInjections, v1alpha1.HTTPFaultInjection{Name: fmt.Sprint(i), Reset: &v1alpha1.FaultReset{Percent: "1"}, Match: m})
		}
		return f
	}
	elsewhere := &v1alpha1.FaultMatch{HTTPMatch: []v1alpha1.FaultHTTPMatch{{Host: &v1alpha1.StringMatch{Exact: "api.example.com"}}}}
	list := breaker("list")
	list.Spec.TrafficInterceptRules = []v1alpha1.TrafficInterceptRule{{Name: "allowed", InterceptType: v1alpha1.InterceptWhitelist, Contents: []string{"api.example.com"}}}
	rules := Rules{
		Breakers: []*v1alpha1.CircuitBreaker{
			breaker("apiserver", rule("deletes", deletes, nil)), breaker("both", rule("deletes", deletes, nil), rule("hosts", nil, hosts)),
			list, breaker("one", rule("either", deletes, hosts)),
		},
		Injections: []*v1alpha1.FaultInjection{injection("apiserver", nil), injection("both", nil, elsewhere), injection("hosts", elsewhere)},
		Cache:      &Cache{},
		Share:      func(types.NamespacedName, string, string, types.UID) *meshv1.Share { return &meshv1.Share{Of: 1} },
	}
	pass := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pass"}}
	pass.Spec.Selector, pass.Spec.ClientCertificates = &metav1.LabelSelector{MatchLabels: map[string]string{"pass": ""}}, v1alpha1.ClientCertificatesPassthrough
	pods := sharingPods(3)
	pods[0].Annotations = map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh}
	pods[1].Annotations, pods[1].Labels["pass"] = map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustBoth}, ""
	r := Compile([]*v1alpha1.ShardingConfig{pass}, pods, nil, rules)
	require.NotEmpty(t, r.Policies["u0"].Refuse)
	require.True(t, r.Policies["u1"].Passthrough)

	rendered := func(uid types.UID) (out []string) {
		for _, b := range r.Policies[uid].Traffic.Breakers {
			for _, l := range b.Rules {
				out = append(out, b.Name+"/"+l.Name+"/"+l.Key)
			}
			for _, i := range b.Intercepts {
				out = append(out, b.Name+"/"+i.Name)
			}
		}
		for _, f := range r.Policies[uid].Traffic.Injections {
			for _, l := range f.Rules {
				out = append(out, "fault/"+f.Name+"/"+l.Name+"/"+l.Key)
			}
		}
		return out
	}
	whole := rendered("u2")
	require.Len(t, whole, 9)
	lacks := slices.DeleteFunc(slices.Clone(whole), func(s string) bool {
		return strings.Contains(s, "apiserver") || strings.Contains(s, "deletes") || strings.Contains(s, "fault/both/0")
	})
	require.Len(t, lacks, 5)
	for _, uid := range []types.UID{"u0", "u1"} {
		require.Equal(t, lacks, rendered(uid), "and counted on where they were")
		require.Equal(t, r.Policies["u2"].Traffic.Egress.Ports, r.Policies[uid].Traffic.Egress.Ports)
	}

	message := map[string][3]string{}
	for _, b := range r.Breakers {
		for i, target := range b.Targets {
			m := message[b.Name]
			m[i] = target.Message
			message[b.Name] = m
			shared := map[string]int{"apiserver": 0, "both": 1, "list": 0, "one": 1}[b.Name]
			if i == 2 {
				shared = len(b.Rules)
			}
			require.Len(t, target.Shared, shared, b.Name)
		}
	}
	for _, f := range r.Injections {
		var m [3]string
		for i, target := range f.Targets {
			m[i] = target.Message
		}
		message["fault "+f.Name] = m
	}
	refused, unread := "all requests of the pod to the apiserver are refused: "+r.Policies["u0"].Refuse, message["apiserver"][1]
	require.Contains(t, unread, "to the apiserver are left unread")
	partly := [3]string{1: "only its rules for other hosts have effect: " + unread}
	require.Equal(t, map[string][3]string{
		"apiserver": {refused, unread}, "both": partly, "list": {}, "one": partly,
		"fault apiserver": {refused, unread}, "fault both": partly, "fault hosts": {},
	}, message)
}

// Of a pod whose policy is unsound nothing is let go.
func TestAnUnsoundPolicyHasTheRules(t *testing.T) {
	rules, _, _ := limits(t, "")
	pod := sharingPods(1)[0]
	p := &meshv1.PodPolicy{Uid: "u0", Refuse: "\xff"}
	_, digest := newTrafficRules(rules).fill(pod, p)
	versioned := versioner{}.finish("n", p, digest)
	require.Contains(t, versioned.Version, "unsound")
	require.NotNil(t, versioned.Traffic.GetEgress())
	other := versioner{}.finish("n", p, []byte("other"))
	require.NotEqual(t, versioned.Version, other.Version)
}

// Its agent would take a refusal without a serial for that of a pod that has no rules.
func TestALostPodHasASerialThoughItsShardIsNoMore(t *testing.T) {
	root, known := rootOf(t)
	m := known.State.Members["uid-vanished"]
	delete(known.State.Shards, m.Shard)
	policy := func() Policy {
		return Compile([]*v1alpha1.ShardingConfig{root}, nil, map[origin.Name]Root{origin.Of(root): known}, Rules{}).Policies["uid-vanished"]
	}
	require.NotEmpty(t, policy().Refuse)
	require.EqualValues(t, m.Serial, policy().Serial)
	m.Serial = 0
	known.State.Members["uid-vanished"] = m
	require.EqualValues(t, 1, policy().Serial)
}

func rootOf(t *testing.T) (*v1alpha1.ShardingConfig, Root) {
	t.Helper()
	configs, _, roots, _ := read(t, "testdata/root.in.yaml")
	for _, c := range configs {
		if known, ok := roots[origin.Of(c)]; ok {
			return c, known
		}
	}
	require.Fail(t, "no root")
	return nil, Root{}
}
