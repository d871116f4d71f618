package dialect

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

// readApp returns an object of testdata.
func readApp(t testing.TB, name string) *kruise.VirtualApp {
	text, err := os.ReadFile("testdata/" + name + ".in.yaml")
	require.NoError(t, err)
	app := &kruise.VirtualApp{}
	require.NoError(t, yaml.UnmarshalStrict(text, app))
	return app
}

func selector(labels ...string) *metav1.LabelSelector {
	out := &metav1.LabelSelector{MatchLabels: map[string]string{}}
	for i := 0; i < len(labels); i += 2 {
		out.MatchLabels[labels[i]] = labels[i+1]
	}
	return out
}

func resources(group string, names ...string) []kruise.APIGroupResource {
	return []kruise.APIGroupResource{{APIGroups: []string{group}, Resources: names}}
}

func TestInvalidVirtualAppsAreRefused(t *testing.T) {
	for message, change := range map[string]func(*kruise.VirtualAppSpec){
		"spec.selector: Required value: name the pods of the operator: an empty selector would take every pod of the namespace": func(s *kruise.VirtualAppSpec) {
			s.Selector = &metav1.LabelSelector{}
		},
		"spec.selector: Too long: may not be more than 2048 bytes": func(s *kruise.VirtualAppSpec) {
			values := slices.Repeat([]string{strings.Repeat("x", 63)}, 40)
			s.Selector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: metav1.LabelSelectorOpIn, Values: values}}}
		},
		"spec.configuration.controller: Forbidden: leaderElectionName and leaderElection.lockName both name the lock: set one of them": func(s *kruise.VirtualAppSpec) {
			s.Configuration.Controller.LeaderElectionName = "other"
		},
		"spec.configuration.webhook.port: Invalid value: 0: must be from 1 to 65535": func(s *kruise.VirtualAppSpec) {
			s.Configuration.Webhook.Port = 0
		},
		`spec.configuration.restConfigOverrides.userAgentOrPrefix: Invalid value: "a\nb": must be printable ASCII, and not begin with a space`: func(s *kruise.VirtualAppSpec) {
			s.Configuration.RestConfigOverrides = &kruise.RestConfigOverrides{UserAgentOrPrefix: new("a\nb")}
		},
		`spec.route.subsetDefaultOnlyUserAgents[1]: Invalid value: "a*": name a User-Agent exactly: it must not be empty, or end with "*"`: func(s *kruise.VirtualAppSpec) {
			s.Route.SubsetDefaultOnlyUserAgents = []string{"a", "a*"}
		},
		"spec.route.subRules[0].match[1].resources: Forbidden: a namespace has one owner for all resources: list the same resources in every rule, or none": func(s *kruise.VirtualAppSpec) {
			s.Route.SubRules[0].Match[1].Resources = resources("apps", "deployments")
		},
		`spec.route.subRules[0].match[1].objectSelector: Invalid value: "a=1,b=2": cannot be negated for the other subsets: use one requirement`: func(s *kruise.VirtualAppSpec) {
			s.Route.SubRules[0].Match[1] = kruise.MatchLimitSelector{ObjectSelector: selector("a", "1", "b", "2"), Resources: resources("apps", "deployments")}
		},
		`spec.subsets[0].routeRules: Invalid value: ["canary-rule"]: its rules match no namespaces, so that it would own nothing: add a namespaceSelector or a namespaceRegex`: func(s *kruise.VirtualAppSpec) {
			s.Route.SubRules[0].Match = []kruise.MatchLimitSelector{{ObjectSelector: selector("a", "1"), Resources: resources("apps", "deployments")}}
		},
		"spec.route.globalLimits[0].resources: Required value: objectSelector requires resources: list whose labels it selects": func(s *kruise.VirtualAppSpec) {
			s.Route.GlobalLimits[0] = kruise.MatchLimitSelector{ObjectSelector: selector("a", "1")}
		},
		`spec.route.globalLimits[0].resources: Invalid value: ["*"]: name the resources: objectSelector would hide all objects without the labels`: func(s *kruise.VirtualAppSpec) {
			s.Route.GlobalLimits[0] = kruise.MatchLimitSelector{ObjectSelector: selector("a", "1"), Resources: resources("apps", "*")}
		},
		"spec.route.globalLimits[0]: Required value: set one of namespaceSelector, namespaceRegex and objectSelector": func(s *kruise.VirtualAppSpec) {
			s.Route.GlobalLimits[0].NamespaceRegex = new("a")
		},
		"spec.route.subRules[0].match[1].namespaceRegex: Invalid value: \"(\": error parsing regexp: missing closing ): `(`": func(s *kruise.VirtualAppSpec) {
			s.Route.SubRules[0].Match[1].NamespaceRegex = new("(")
		},
		`spec.route.subRules[0].match[0].resources[0].resources[0]: Invalid value: "pods/log": subresources follow their resource: write pods`: func(s *kruise.VirtualAppSpec) {
			s.Route.SubRules[0].Match[0].Resources = resources("", "pods/log")
		},
		`spec.route.subRules[1].name: Duplicate value: "canary-rule"`: func(s *kruise.VirtualAppSpec) {
			s.Route.SubRules = append(s.Route.SubRules, s.Route.SubRules[0])
		},
		`spec.subsets[0].routeRules[0]: Not found: "other"`: func(s *kruise.VirtualAppSpec) { s.Subsets[0].RouteRules[0] = "other" },
		"spec.subsets[1].routeRules[0]: Forbidden: subset v2 has rule canary-rule already, and a namespace belongs to one subset: write a rule for each subset": func(s *kruise.VirtualAppSpec) {
			s.Subsets = append(s.Subsets, kruise.VirtualAppSubset{Name: "v3", Labels: map[string]string{"version": "v3"}, RouteRules: []string{"canary-rule"}})
		},
		"spec.subsets[0].labels: Required value: name the labels of its pods: it would have all pods":                 func(s *kruise.VirtualAppSpec) { s.Subsets[0].Labels = nil },
		"spec.subsets[0].routeRules: Required value: name rules of spec.route.subRules: the subset would own nothing": func(s *kruise.VirtualAppSpec) { s.Subsets[0].RouteRules = nil },
		"spec.route.subsetPublicResources[0]: Forbidden: the rules of spec.route.subRules divide these resources: list them in one of both places": func(s *kruise.VirtualAppSpec) {
			for i := range s.Route.SubRules[0].Match {
				s.Route.SubRules[0].Match[i].Resources = resources("apps", "deployments")
			}
			s.Route.SubsetPublicResources = resources("*", "deployments")
		},
		`spec.root.subsets[0].name: Duplicate value: "default"`: func(s *kruise.VirtualAppSpec) { s.Subsets[0].Name = "default" },
	} {
		app := readApp(t, "controllermesh-virtualapp")
		change(&app.Spec)
		_, errs := VirtualApp(app)
		found := make([]string, len(errs))
		for i, err := range errs {
			found[i] = err.Error()
		}
		require.Contains(t, found, message)
	}
}

// A few hundred bytes of groups and resources have thousands of pairs, in each of many rules.
func TestPairsOfGroupAndResourceAreFew(t *testing.T) {
	app := &kruise.VirtualApp{Spec: kruise.VirtualAppSpec{Selector: selector("a", "b"), Route: &kruise.VirtualAppRoute{}}}
	app.Name = "app"
	many := make([]string, 64)
	for i := range many {
		many[i] = fmt.Sprint("r", i)
	}
	rule := kruise.SubRule{Name: "rule", Match: slices.Repeat([]kruise.MatchLimitSelector{{
		NamespaceRegex: new("a"), Resources: []kruise.APIGroupResource{{APIGroups: many, Resources: many}},
	}}, 4)}
	app.Spec.Route.SubRules = []kruise.SubRule{rule}
	app.Spec.Subsets = []kruise.VirtualAppSubset{{Name: "a", Labels: map[string]string{"a": "b"}, RouteRules: []string{"rule"}}}
	_, errs := VirtualApp(app)
	require.Empty(t, errs)
	app.Spec.Route.SubRules[0].Match = append(rule.Match, rule.Match[0])
	_, errs = VirtualApp(app)
	require.Len(t, errs, 1)
	require.ErrorContains(t, errs[0], "spec.route.subRules[0].match[4].resources: Forbidden: with the rules before, it names 20480 pairs")
}

func TestLongNamesOfShardsAreRefused(t *testing.T) {
	app := readApp(t, "controllermesh-virtualapp")
	app.Name = strings.Repeat("a", 56)
	_, errs := VirtualApp(app)
	require.ErrorContains(t, errs.ToAggregate(), "metadata.name: Invalid value")
	app.Name, app.Spec.Subsets[0].Name = strings.Repeat("a", 50), "a-rather-long-name"
	_, errs = VirtualApp(app)
	require.ErrorContains(t, errs.ToAggregate(), "which has more than 63 characters: shorten metadata.name or the name of the subset")
}

func TestBothSpellingsNameOneLock(t *testing.T) {
	for _, seed := range []string{"controllermesh-virtualapp", "controllermesh-virtualapp-leaderElectionName"} {
		out, errs := VirtualApp(readApp(t, seed))
		require.Empty(t, errs)
		require.Equal(t, &v1alpha1.ControllerConfig{LeaderElectionName: "test-operator"}, out.Config.Spec.Controller)
	}
}

func TestUserAgentThatEndsWithSlashIsAPrefix(t *testing.T) {
	for text, want := range map[string]v1alpha1.UserAgent{"canary": {Value: "canary"}, "canary/": {Prefix: "canary/"}, "a/b": {Value: "a/b"}} {
		app := randomApp(rand.New(rand.NewPCG(1, 2)))
		app.Spec.Configuration = &kruise.VirtualAppConfiguration{RestConfigOverrides: &kruise.RestConfigOverrides{UserAgentOrPrefix: &text}}
		out, errs := VirtualApp(app)
		require.Empty(t, errs)
		require.Empty(t, validate.Config(out.Config))
		require.Equal(t, &want, out.Config.Spec.UserAgent)
	}
}

func TestVirtualAppWithoutSubsetsIsOneShard(t *testing.T) {
	app := readApp(t, "controllermesh-virtualapp")
	app.Spec.Subsets = nil
	out, errs := VirtualApp(app)
	require.Empty(t, errs)
	require.Contains(t, out.Warnings, "spec.subsets: the default subset owns all namespaces, where openkruise denies requests for all of them")
	require.Contains(t, out.Warnings, "spec.route.subRules[0]: rule canary-rule has no effect: no subset lists it in routeRules")
	require.Empty(t, out.Remainder)
	require.Empty(t, validate.Config(out.Config))
}

func TestTranslationLeavesVirtualAppUnchanged(t *testing.T) {
	app := readApp(t, "virtualapp-all")
	before := app.DeepCopy()
	out, errs := VirtualApp(app)
	require.Empty(t, errs)
	require.Equal(t, before, app)
	out.Config.Labels["team"] = "b"
	out.Config.Spec.Root.TargetSelector.MatchLabels["component"] = "other"
	out.Config.Spec.Root.Subsets[0].PodLabels["version"] = "other"
	out.Config.Spec.Root.ResourceSelector[0].RelateResources[0].Resources[0] = "other"
	out.Config.Spec.Limits[1].Selector.MatchLabels["managed"] = "other"
	require.Equal(t, before, app, "the translation shares memory with its source")
}
