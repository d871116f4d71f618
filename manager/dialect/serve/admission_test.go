package serve

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/crdtest"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

// admit has the webhook judge an object, and its old version for an update.
func admit(t *testing.T, text, old []byte, existing ...client.Object) admission.Response {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, corev1.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	require.NoError(t, AddToScheme(scheme))
	reader := Reader{fake.NewClientBuilder().WithScheme(scheme).WithObjects(existing...).Build()}
	w := &validate.Webhook{Reader: reader, Namespace: "mesh", Settings: platform.Default, Translate: Decode}
	var kind metav1.TypeMeta
	require.NoError(t, yaml.Unmarshal(text, &kind))
	req := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: admissionv1.Create, Namespace: "ns", Kind: metav1.GroupVersionKind(kind.GroupVersionKind())}}
	var err error
	req.Object.Raw, err = yaml.YAMLToJSON(text)
	require.NoError(t, err)
	if old != nil {
		req.Operation = admissionv1.Update
		req.OldObject.Raw, err = yaml.YAMLToJSON(old)
		require.NoError(t, err)
	}
	return w.Handle(t.Context(), req)
}

func seed(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "testdata", name+".in.yaml"))
	require.NoError(t, err)
	return text
}

func TestSeedsAreAdmitted(t *testing.T) {
	ofApps := []string{
		"spec.subsets: every subset reads cluster-scoped objects, where openkruise serves them to the default subset alone",
		"the mesh or its administrator excludes *.ctrlmesh.kusionstack.io from division: every subset reads and writes these resources",
	}
	for name, warnings := range map[string][]string{
		"ctrlmesh-shardingconfig": nil, "kridge-shardingconfig": nil,
		"controllermesh-virtualapp": ofApps, "controllermesh-virtualapp-leaderElectionName": ofApps,
	} {
		t.Run(name, func(t *testing.T) {
			r := admit(t, seed(t, name), nil)
			require.True(t, r.Allowed, r.Result)
			require.Equal(t, warnings, r.Warnings)
			require.True(t, admit(t, seed(t, name), seed(t, name)).Allowed, "an update")
		})
	}
}

func TestObjectsOfOtherKindsConflict(t *testing.T) {
	native := func(name, lock string) *v1alpha1.ShardingConfig {
		return &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: v1alpha1.ShardingConfigSpec{
			Controller: &v1alpha1.ControllerConfig{LeaderElectionName: lock},
		}}
	}
	for name, c := range map[string]struct {
		existing client.Object
		says     string
	}{
		"the same name":       {native("sharding-demo", "other"), "metadata.name: ShardingConfig sharding-demo has this name too"},
		"the same lock":       {native("other", "operator-leader"), "lock ns/operator-leader is also that of ShardingConfig other"},
		"neither":             {native("other", "other"), ""},
		"an older version":    {ofKridge("sharding-demo"), ""},
		"in other namespaces": {&v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "elsewhere", Name: "sharding-demo"}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := admit(t, seed(t, "kridge-shardingconfig"), nil, c.existing)
			require.Equal(t, c.says == "", r.Allowed, r.Result)
			if c.says != "" {
				require.Contains(t, r.Result.Message, c.says)
			}
		})
	}
	t.Run("a native object beside one of a dialect", func(t *testing.T) {
		r := admit(t, seed(t, "ctrlmesh-shardingconfig"), nil, ofKridge("sharding-demo"))
		require.False(t, r.Allowed)
		require.Contains(t, r.Result.Message, "ShardingConfig.kridge.kusionstack.io sharding-demo has this name too")
	})
}

// Its selector would put the mesh's own pods on the mesh.
func TestVirtualAppsInTheNamespaceOfTheMesh(t *testing.T) {
	app := &kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "app"}, Spec: kruise.VirtualAppSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}},
	}}
	raw, err := json.Marshal(app)
	require.NoError(t, err)
	scheme := runtime.NewScheme()
	require.NoError(t, errors.Join(corev1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), AddToScheme(scheme)))
	w := &validate.Webhook{Reader: Reader{fake.NewClientBuilder().WithScheme(scheme).Build()}, Namespace: "mesh", Settings: platform.Default, Translate: Decode}
	for namespace, allowed := range map[string]bool{"mesh": false, "ns": true} {
		r := w.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
			Operation: admissionv1.Create, Namespace: namespace, Kind: metav1.GroupVersionKind(origin.VirtualApp), Object: runtime.RawExtension{Raw: raw},
		}})
		require.Equal(t, allowed, r.Allowed, r.Result)
	}
}

func TestDialectObjectsRequireASelector(t *testing.T) {
	for _, kind := range []string{"{apiVersion: ctrlmesh.kruise.io/v1alpha1, kind: VirtualApp, metadata: {name: a}, spec: {}}", "{apiVersion: kridge.kusionstack.io/v1alpha1, kind: ShardingConfig, metadata: {name: a}, spec: {}}"} {
		r := admit(t, []byte(kind), nil)
		require.False(t, r.Allowed)
		require.Contains(t, r.Result.Message, "spec.selector: Required")
	}
}

// What an object is known by cannot change, by the schemas alone.
func TestWhatDialectObjectsAreKnownByStays(t *testing.T) {
	const shard = "{metadata: {name: a}, spec: {selector: {matchLabels: {a: b}}, limits: [{}]}}"
	const root = "{metadata: {name: a}, spec: {root: {prefix: a, targetStatefulSet: b, auto: {shardingSize: 1, everyShardReplicas: 1}}}}"
	for name, c := range map[string]struct{ definition, old, from, to, says string }{
		"VirtualApp":  {"ctrlmesh.kruise.io_virtualapps", shard, "a: b}", "a: c}", "is immutable: delete this VirtualApp and create another"},
		"selector":    {"kridge.kusionstack.io_shardingconfigs", shard, "a: b}", "a: c}", "spec.selector is immutable: delete this ShardingConfig and create another"},
		"prefix":      {"kridge.kusionstack.io_shardingconfigs", root, "prefix: a", "prefix: c", "spec.root.prefix: Invalid value: \"c\": is immutable"},
		"StatefulSet": {"kridge.kusionstack.io_shardingconfigs", root, "targetStatefulSet: b", "targetStatefulSet: c", "spec.root.targetStatefulSet: Invalid value: \"c\": is immutable"},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after map[string]any
			require.NoError(t, yaml.Unmarshal([]byte(c.old), &before))
			require.NoError(t, yaml.Unmarshal([]byte(strings.Replace(c.old, c.from, c.to, 1)), &after))
			schema := crdtest.Load(t, c.definition)
			require.ErrorContains(t, schema.Update(before, after).ToAggregate(), c.says)
			after["spec"] = before["spec"]
			require.Empty(t, schema.Update(before, after))
		})
	}
}

func TestVirtualAppsWithLongNamesAreRefused(t *testing.T) {
	schema := crdtest.Load(t, "ctrlmesh.kruise.io_virtualapps")
	for _, c := range []struct {
		name, subset int // lengths
		says         string
	}{
		{55, 7, ""}, {56, 1, "more than 63 characters"}, {55, 8, "more than 63 characters"}, {40, 22, ""}, {40, 23, "more than 63 characters"},
	} {
		o := map[string]any{
			"apiVersion": "ctrlmesh.kruise.io/v1alpha1", "kind": "VirtualApp", "metadata": map[string]any{"name": strings.Repeat("a", c.name)},
			"spec": map[string]any{"selector": map[string]any{"matchLabels": map[string]any{"a": "b"}}, "subsets": []any{
				map[string]any{"name": strings.Repeat("s", c.subset), "labels": map[string]any{"a": "b"}, "routeRules": []any{"r"}},
			}},
		}
		if _, errs := schema.Admit(o); c.says == "" {
			require.Empty(t, errs)
		} else {
			require.ErrorContains(t, errs.ToAggregate(), c.says)
		}
	}
}

// A VirtualApp that changes must not lift what a policy says about another one.
func TestPolicyKeepsTheTargetsThatRemain(t *testing.T) {
	labels := func(prefix string) map[string]string {
		out := map[string]string{}
		for i := range 10 {
			out[fmt.Sprint(prefix, i)] = "x"
		}
		return out
	}
	app := func(name string, subsets ...kruise.VirtualAppSubset) *kruise.VirtualApp {
		return &kruise.VirtualApp{ObjectMeta: meta(name), Spec: kruise.VirtualAppSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}, Subsets: subsets,
		}}
	}
	policy := &kruise.TrafficPolicy{ObjectMeta: meta("policy"), Spec: kruise.TrafficPolicySpec{
		TargetVirtualApps: []kruise.TargetVirtualApp{{Name: "large", SpecificSubsets: []string{""}}, {Name: "small"}},
		CircuitBreaking: &kruise.CircuitBreaking{APIServer: &kruise.APIServerRules{NonResourceRules: []kruise.NonResourceRule{
			{Verbs: []string{"get"}, NonResourceURLs: []string{"/x"}},
		}}},
	}}
	large := app("large", kruise.VirtualAppSubset{Name: "a", Labels: labels("a")}, kruise.VirtualAppSubset{Name: "b", Labels: labels("b")})
	c := newClient(t, policy, app("small"), large)
	policies, err := Policies(t.Context(), c)
	require.NoError(t, err)
	require.Len(t, policies, 1)
	require.Empty(t, policies[0].Problem)
	require.Len(t, policies[0].Breakers, 1)
	require.Equal(t, "small", policies[0].Breakers[0].Spec.Selector.MatchLabels["app"])
	require.Contains(t, policies[0].Remainder[0], "VirtualApp large need more than 32 selectors")
}

func TestAdmissionOfTrafficPolicies(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, AddToScheme(scheme))
	w := PolicyWebhook{Reader: fake.NewClientBuilder().WithScheme(scheme).Build()}
	review := func(spec string) admission.Response {
		req := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: admissionv1.Create, Namespace: "ns"}}
		var err error
		req.Object.Raw, err = yaml.YAMLToJSON([]byte("spec: " + spec))
		require.NoError(t, err)
		return w.Handle(t.Context(), req)
	}
	r := review("{targetVirtualApps: [{name: app}], rateLimiting: {ratePolicies: [{maxInFlight: 1, rules: {nonResourceRules: [{verbs: [get], nonResourceURLs: [/x]}]}}]}}")
	require.True(t, r.Allowed, r.Result)
	require.Equal(t, []string{"spec.targetVirtualApps[0]: there is no VirtualApp app in this namespace"}, r.Warnings)
	r = review("{targetVirtualApps: []}")
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "spec.targetVirtualApps: Required")
}
