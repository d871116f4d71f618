package compile

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
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
	rules, _, told := limits(t, "uid-operator-0")
	before := told(rules)
	require.Len(t, before, 5)

	c := named(rules, "limits")
	c.Annotations[v1alpha1.RecoverAnnotation] = strings.Repeat("4", 10000)
	rules.Share = func(breaker types.NamespacedName, rule, pod string, uid types.UID) *meshv1.Share {
		require.Equal(t, "ns/limits together", breaker.String()+" "+rule)
		return &meshv1.Share{Index: 1, Of: 2}
	}
	after := told(rules)
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
	changed := told(rules)
	for name, rule := range after {
		if name == "limits/pods" {
			require.NotEqual(t, rule.Key, changed[name].Key)
		} else {
			require.Equal(t, rule.Key, changed[name].Key, name)
		}
	}

	// An object of the same name is another one.
	c.UID = "another"
	require.NotEqual(t, changed["limits/together"].Key, told(rules)["limits/together"].Key)
}

// Rules that do not select a pod change nothing of its policy.
func TestPodsWithoutRulesAreToldAsBefore(t *testing.T) {
	_, pods, _, rules := read(t, "testdata/traffic.in.yaml")
	with, without := Compile(nil, pods, nil, rules), Compile(nil, pods, nil, Rules{})
	require.Equal(t, without.Policies["uid-spared"].Version, with.Policies["uid-spared"].Version)
	require.Nil(t, with.Policies["uid-spared"].Traffic)
	require.NotEqual(t, without.Policies["uid-operator-0"].Version, with.Policies["uid-operator-0"].Version)
	require.NotContains(t, with.Policies, types.UID("uid-unlabelled"))
}

// Together, rules may be more than an agent would take.
func TestMoreThanAPodCanBeTold(t *testing.T) {
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
			require.Equal(t, b.Name == "other", strings.Contains(target.Message, "more than it can be told"), b.Name)
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
	told := r.Policies["1"].Traffic
	require.Len(t, told.Breakers, 1)
	require.Empty(t, told.Breakers[0].Intercepts[0].Http, "a whitelist that cannot be read allows nothing")
	require.True(t, told.Egress.RefuseUnseen)
	require.Equal(t, ReasonInvalid, r.Injections[0].Problem.Reason)
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
