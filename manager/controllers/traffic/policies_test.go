package traffic

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/testenv"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

// limited is a policy with two rules for a VirtualApp.
func limited(name, app string) *kruise.TrafficPolicy {
	rules := kruise.APIServerRules{ResourceRules: []kruise.ResourceRule{{
		Verbs: []string{"list"}, APIGroups: []string{""}, Resources: []string{"pods"}, Namespaces: []string{"*"},
	}}}
	return &kruise.TrafficPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: "policy-uid", Generation: 2}, Spec: kruise.TrafficPolicySpec{
		TargetVirtualApps: []kruise.TargetVirtualApp{{Name: app}},
		RateLimiting: &kruise.RateLimiting{RatePolicies: []kruise.RatePolicy{
			{Rules: rules, MaxInFlight: new(int32(1))}, {Rules: rules, Bucket: &kruise.RateBucket{QPS: 1, Burst: 1}},
		}},
	}}
}

func TestTrafficPolicies(t *testing.T) {
	app := &kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "app", UID: "app"}, Spec: kruise.VirtualAppSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"shard": "a"}},
	}}
	w := newWorld(t, app, limited("policy", "app"), testenv.MemberPod("a", v1alpha1.TrustBoth), testenv.MemberPod("b", v1alpha1.TrustBoth))
	w.policy.Dialects = true
	require.NoError(t, w.policy.Reconcile(t.Context()))
	breakers := func(pod string) []*meshv1.Breaker {
		for uid, p := range w.Controller.State.Compiled.Load().Policies {
			if string(uid) == pod {
				return p.GetTraffic().GetBreakers()
			}
		}
		return nil
	}
	require.Len(t, breakers("a"), 2, "one for each rule")
	require.Empty(t, breakers("b"), "its labels are others")

	metrics.BreakersOpen.Reset()
	require.NoError(t, w.Reconcile(t.Context()))
	require.Equal(t, 1, testutil.CollectAndCount(metrics.BreakersOpen), "that of the policy")
	require.True(t, metrics.BreakersOpen.DeleteLabelValues("ns", "policy"))
	is := testenv.Get(t, w.Env, "ns", "policy", &kruise.TrafficPolicy{})
	require.EqualValues(t, 1, is.Status.Pods)
	require.EqualValues(t, 2, is.Status.ObservedGeneration)
	require.Len(t, is.Status.TargetStatus, 1)
	require.Len(t, is.Status.TargetStatus[0].LimitingSnapshots, 2)
	require.NotNil(t, meta.FindStatusCondition(is.Status.Conditions, v1alpha1.ConditionReady))
	require.Equal(t, limited("policy", "app").Spec, is.Spec)
	require.NoError(t, w.Reconcile(t.Context()))
	require.Equal(t, is.ResourceVersion, testenv.Get(t, w.Env, "ns", "policy", &kruise.TrafficPolicy{}).ResourceVersion, "nothing to write")
}

func TestTrafficPoliciesWithoutEffect(t *testing.T) {
	w := newWorld(t, limited("policy", "missing"))
	w.policy.Dialects = true
	require.NoError(t, w.policy.Reconcile(t.Context()))
	require.NoError(t, w.Reconcile(t.Context()))
	is := testenv.Get(t, w.Env, "ns", "policy", &kruise.TrafficPolicy{})
	require.Contains(t, meta.FindStatusCondition(is.Status.Conditions, v1alpha1.ConditionReady).Message, "there is no VirtualApp missing")
}
