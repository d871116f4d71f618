package dialect

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// readPolicy returns the policy of testdata and its VirtualApp.
func readPolicy(t testing.TB) (*kruise.TrafficPolicy, *kruise.VirtualApp) {
	text, err := os.ReadFile("testdata/trafficpolicy.in.yaml")
	require.NoError(t, err)
	first, second, _ := strings.Cut(string(text), "\n---\n")
	app, policy := &kruise.VirtualApp{}, &kruise.TrafficPolicy{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(first), app))
	require.NoError(t, yaml.UnmarshalStrict([]byte(second), policy))
	return policy, app
}

func TestInvalidTrafficPoliciesAreRefused(t *testing.T) {
	for message, change := range map[string]func(*kruise.TrafficPolicySpec){
		`spec.targetVirtualApps: Required value: name VirtualApps; "*" is all of this namespace`: func(s *kruise.TrafficPolicySpec) {
			s.TargetVirtualApps = nil
		},
		"spec.circuitBreaking.apiServer.resourceRules[0].namespaces: Required value: list namespaces, or set clusterScope": func(s *kruise.TrafficPolicySpec) {
			s.CircuitBreaking.APIServer.ResourceRules[0].Namespaces = nil
		},
		`spec.circuitBreaking.apiServer.resourceRules[0].verbs: Invalid value: ["get","*"]: "*" must be alone in its list`: func(s *kruise.TrafficPolicySpec) {
			s.CircuitBreaking.APIServer.ResourceRules[0].Verbs = []string{"get", "*"}
		},
		`spec.circuitBreaking.apiServer.resourceRules[0].resources: Required value: list values; "*" alone is all`: func(s *kruise.TrafficPolicySpec) {
			s.CircuitBreaking.APIServer.ResourceRules[0].Resources = nil
		},
		"spec.circuitBreaking.apiServer.nonResourceRules[0].nonResourceURLs: Required value: list paths": func(s *kruise.TrafficPolicySpec) {
			s.CircuitBreaking.APIServer.NonResourceRules[0].NonResourceURLs = nil
		},
		"spec.rateLimiting.ratePolicies[0].maxInFlight: Invalid value: 0: must be at least 1": func(s *kruise.TrafficPolicySpec) {
			s.RateLimiting.RatePolicies[0].MaxInFlight = new(int32(0))
		},
		"spec.rateLimiting.ratePolicies[0].bucket.burst: Invalid value: 0: must be at least 1": func(s *kruise.TrafficPolicySpec) {
			s.RateLimiting.RatePolicies[0].Bucket.Burst = 0
		},
		"spec.rateLimiting.ratePolicies[0].exponentialBackoff.maxDelayInMillisecond: Invalid value: 1: must be at least 100": func(s *kruise.TrafficPolicySpec) {
			s.RateLimiting.RatePolicies[0].ExponentialBackoff.MaxDelayInMillisecond = 1
		},
	} {
		policy, app := readPolicy(t)
		change(&policy.Spec)
		_, errs := TrafficPolicy(policy, []*kruise.VirtualApp{app})
		found := make([]string, len(errs))
		for i, err := range errs {
			found[i] = err.Error()
		}
		require.Contains(t, found, message)
	}
}

func TestPoliciesWithoutEffectAreNamed(t *testing.T) {
	for message, change := range map[string]func(*kruise.TrafficPolicySpec){
		"spec.targetVirtualApps[0]: there is no VirtualApp other in this namespace": func(s *kruise.TrafficPolicySpec) { s.TargetVirtualApps[0].Name = "other" },
		"spec.targetVirtualApps[0].specificSubsets[1]: there is no subset v9":       func(s *kruise.TrafficPolicySpec) { s.TargetVirtualApps[0].SpecificSubsets[1] = "v9" },
		"spec.rateLimiting.ratePolicies[0]: it has no effect: set bucket, maxInFlight or exponentialBackoff": func(s *kruise.TrafficPolicySpec) {
			s.RateLimiting.RatePolicies[0] = kruise.RatePolicy{}
		},
		"spec.circuitBreaking.apiServer: it has no effect: list requests in resourceRules or nonResourceRules": func(s *kruise.TrafficPolicySpec) {
			s.CircuitBreaking.APIServer = &kruise.APIServerRules{}
		},
		"spec: this has no effect: it has neither circuitBreaking nor rateLimiting": func(s *kruise.TrafficPolicySpec) {
			s.CircuitBreaking, s.RateLimiting = nil, nil
		},
	} {
		policy, app := readPolicy(t)
		change(&policy.Spec)
		out, errs := TrafficPolicy(policy, []*kruise.VirtualApp{app})
		require.Empty(t, errs)
		require.Contains(t, out.Warnings, message)
	}
}

func TestRulesMatchTheSameNamespacesAsInOpenkruise(t *testing.T) {
	for _, namespaces := range [][]string{{"*"}, {"a", "b"}, nil} {
		for _, cluster := range []bool{false, true} {
			if namespaces == nil && !cluster {
				continue // refused
			}
			policy, app := readPolicy(t)
			rule := kruise.ResourceRule{Verbs: []string{"*"}, APIGroups: []string{"*"}, Resources: []string{"*"}, Namespaces: namespaces, ClusterScope: cluster}
			policy.Spec.RateLimiting, policy.Spec.CircuitBreaking = nil, &kruise.CircuitBreaking{APIServer: &kruise.APIServerRules{ResourceRules: []kruise.ResourceRule{rule}}}
			out, errs := TrafficPolicy(policy, []*kruise.VirtualApp{app})
			require.Empty(t, errs)
			require.Empty(t, out.Remainder)
			require.NotEmpty(t, out.Breakers)
			require.Empty(t, validate.Breaker(out.Breakers[0]))
			var matches []*match.Resource
			for _, m := range compile.RenderBreaker(out.Breakers[0]).Rules[0].Resources {
				compiled, err := match.NewResource(m)
				require.NoError(t, err)
				matches = append(matches, compiled)
			}
			for _, namespace := range []string{"", "a", "c"} {
				want := cluster // as in openkruise
				if namespace != "" {
					want = slices.Contains(namespaces, "*") || slices.Contains(namespaces, namespace)
				}
				got := slices.ContainsFunc(matches, func(m *match.Resource) bool { return m.Match(&match.Object{Namespace: namespace}) })
				require.Equal(t, want, got, "namespaces %q, clusterScope %t, request in %q", namespaces, cluster, namespace)
			}
		}
	}
}

func TestTargetsSelectPodsOfVirtualApps(t *testing.T) {
	policy, app := readPolicy(t)
	other := app.DeepCopy()
	other.Name, other.Spec.Selector, other.Spec.Subsets = "other", selector("component", "other"), nil
	elsewhere := other.DeepCopy()
	elsewhere.Name, elsewhere.Namespace = "elsewhere", "elsewhere"
	policy.Spec.RateLimiting = nil
	for name, c := range map[string]struct {
		target kruise.TargetVirtualApp
		want   []string
	}{
		"all":                {kruise.TargetVirtualApp{Name: "*"}, []string{"component=other", "component=test-operator"}},
		"all subsets of one": {kruise.TargetVirtualApp{Name: "test-operator", SpecificSubsets: []string{"*"}}, []string{"component=test-operator"}},
		"one subset":         {kruise.TargetVirtualApp{Name: "test-operator", SpecificSubsets: []string{"v2"}}, []string{"component=test-operator,version=v2"}},
		"default subsets": {kruise.TargetVirtualApp{Name: "*", SpecificSubsets: []string{""}}, []string{
			"component=other",
			"component=test-operator,size notin (large),version notin (v2)",
			"component=test-operator,size=large,version notin (v2),zone notin (a)",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			policy.Spec.TargetVirtualApps = []kruise.TargetVirtualApp{c.target, c.target} // twice is once
			out, errs := TrafficPolicy(policy, []*kruise.VirtualApp{app, elsewhere, other})
			require.Empty(t, errs)
			var got []string
			uids := map[string]bool{}
			for _, b := range out.Breakers {
				got = append(got, metav1.FormatLabelSelector(b.Spec.Selector))
				uids[string(b.UID)+b.Name] = true
			}
			require.Equal(t, c.want, got)
			require.Len(t, uids, len(got), "breakers of one uid are compiled once")
		})
	}
}

func TestTooManyBreakersAreRefused(t *testing.T) {
	policy, app := readPolicy(t)
	policy.Spec.TargetVirtualApps = []kruise.TargetVirtualApp{{Name: "*"}}
	policy.Spec.CircuitBreaking = nil
	policy.Spec.RateLimiting.RatePolicies = slices.Repeat(policy.Spec.RateLimiting.RatePolicies[:1], 64)
	apps := make([]*kruise.VirtualApp, 9)
	for i := range apps {
		apps[i] = app.DeepCopy()
		apps[i].Name = fmt.Sprint("app-", i)
		apps[i].Spec.Selector = selector("component", apps[i].Name)
	}
	_, errs := TrafficPolicy(policy, apps[:8])
	require.Empty(t, errs)
	_, errs = TrafficPolicy(policy, apps)
	require.ErrorContains(t, errs.ToAggregate(), "it would become 576 CircuitBreakers, and at most 512 are supported")
}

func TestTooManySelectorsAreRefused(t *testing.T) {
	policy, app := readPolicy(t)
	policy.Spec.TargetVirtualApps[0].SpecificSubsets = []string{""}
	for i := range 4 {
		app.Spec.Subsets = append(app.Spec.Subsets, kruise.VirtualAppSubset{
			Name: fmt.Sprintf("s%d", i), Labels: map[string]string{fmt.Sprintf("a%d", i): "1", fmt.Sprintf("b%d", i): "1", fmt.Sprintf("c%d", i): "1"},
		})
	}
	_, errs := TrafficPolicy(policy, []*kruise.VirtualApp{app})
	require.EqualError(t, errs.ToAggregate(), "spec.targetVirtualApps: Forbidden: the pods of a subset of VirtualApp test-operator need more than 32 selectors: give its subsets fewer labels, or target all of them")
}
