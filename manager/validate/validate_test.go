package validate

import (
	"encoding/json"
	"fmt"
	"os"
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
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

func config(t *testing.T, name, spec string) *v1alpha1.ShardingConfig {
	t.Helper()
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
	require.NoError(t, yaml.UnmarshalStrict([]byte(spec), &c.Spec))
	return c
}

const good = `
selector: {matchLabels: {shard: "0"}}
controller: {leaderElectionName: lock}
limits:
- relateResources: [{apiGroups: ["", apps], resources: [pods]}]
  selector: {matchExpressions: [{key: a, operator: In, values: [b]}]}
`

// Each value is compared with each pod whenever policies are compiled.
func TestLongSelectorsOfPodsAreRefused(t *testing.T) {
	values := make([]string, maxPodValues)
	for i := range values {
		values[i] = fmt.Sprint("v", i)
	}
	long := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: metav1.LabelSelectorOpIn, Values: values}}}
	const message = `selector: Invalid value: "(1025 labels and values)": more than 1024: give the pods a label of their own`
	byHand := config(t, "c", good)
	byHand.Spec.Selector = long
	require.EqualError(t, Config(byHand).ToAggregate(), "spec."+message)
	byHand.Spec.Selector.MatchExpressions[0].Values = values[1:]
	require.Empty(t, Config(byHand))

	long.MatchExpressions[0].Values = values
	require.EqualError(t, Breaker(&v1alpha1.CircuitBreaker{Spec: v1alpha1.CircuitBreakerSpec{Selector: long}}).ToAggregate(), "spec."+message)
	require.EqualError(t, Injection(&v1alpha1.FaultInjection{Spec: v1alpha1.FaultInjectionSpec{Selector: long}}).ToAggregate(), "spec."+message)
	root := config(t, "c", `
root:
  prefix: c
  targetSelector: {matchLabels: {app: c}}
  resourceSelector: [{relateResources: [{apiGroups: [""], resources: [configmaps]}]}]
`)
	require.Empty(t, Config(root))
	root.Spec.Root.TargetSelector = long
	require.ErrorContains(t, Config(root).ToAggregate(), "spec.root.targetSelector: Invalid value: \"(1025 labels and values)\"")
}

func TestConfig(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	require.NoError(t, schema.judge(t, good))
	for what, c := range map[string]struct{ old, new, says string }{
		"operator":                    {"operator: In", "operator: Within", "spec.limits[0].selector.matchExpressions[0].operator"},
		"no values":                   {", values: [b]", "", "spec.limits[0].selector.matchExpressions[0].values"},
		"value":                       {"[b]", `["b b"]`, "spec.limits[0].selector.matchExpressions[0].values[0]"},
		"key":                         {"key: a", "key: a//b", "spec.limits[0].selector.matchExpressions[0].key"},
		"pod selector":                {`shard: "0"`, `shard: "-"`, "spec.selector.matchLabels"},
		"no selector":                 {`selector: {matchLabels: {shard: "0"}}`, "", "spec.selector is required"},
		"empty":                       {`{matchLabels: {shard: "0"}}`, "{}", "spec.selector: Invalid value: must not be empty"},
		"all":                         {"selector: {matchExpressions: [{key: a, operator: In, values: [b]}]}", "selector: {}", "spec.limits[0].selector: Required"},
		"not said":                    {"  selector: {matchExpressions: [{key: a, operator: In, values: [b]}]}", "", "spec.limits[0].selector: Required"},
		"star":                        {`["", apps]`, `["*", apps]`, "spec.limits[0].relateResources[0].apiGroups[0]"},
		"group":                       {`["", apps]`, `[Apps]`, "spec.limits[0].relateResources[0].apiGroups[0]"},
		"subresource":                 {`[pods]`, `[pods/status]`, "write pods"},
		"no resources":                {`resources: [pods]`, "resources: []", "spec.limits[0].relateResources[0].resources: Invalid"},
		"all resources":               {`resources: [pods]`, `resources: ["*"]`, "cannot carry its labels"},
		"of nothing":                  {`- relateResources: [{apiGroups: ["", apps], resources: [pods]}]`, "- relateResources: []", "spec.limits[0].relateResources: Required"},
		"lock name":                   {"leaderElectionName: lock", "leaderElectionName: Lock_1", "spec.controller.leaderElectionName"},
		"excluded lock that is named": {"leaderElectionName: lock", "leaderElectionName: lock, excludedLocks: [{namespace: ns, name: lo*}]", "cannot exclude it"},
		"all locks excluded":          {"leaderElectionName: lock", "excludedLocks: [{namespace: ns, name: '*'}]", "spec.controller.excludedLocks[0].name"},
		"excluded lock's name":        {"leaderElectionName: lock", "excludedLocks: [{namespace: ns, name: 'a*b'}]", "spec.controller.excludedLocks[0].name"},
		"namespace of excluded lock":  {"leaderElectionName: lock", "excludedLocks: [{namespace: '*', name: a}]", "spec.controller.excludedLocks[0].namespace"},
		"lock too long":               {"leaderElectionName: lock", "leaderElectionName: " + strings.Repeat("l", 250), "189"},
	} {
		changed := strings.Replace(good, c.old, c.new, 1)
		require.NotEqual(t, good, changed, what)
		require.ErrorContains(t, schema.judge(t, changed), c.says, what)
	}
	require.ErrorContains(t, schema.judge(t, "selector: {matchLabels: {a: b}}"), "spec.limits is required")
	const pass = "selector: {matchLabels: {a: b}}\nclientCertificates: Passthrough\n"
	require.NoError(t, schema.judge(t, pass))
	for _, more := range []string{"controller: {leaderElectionName: lock}", "limits: [{relateResources: [{apiGroups: [''], resources: [pods]}], selector: {matchLabels: {a: b}}}]", "root: {prefix: r, targetStatefulSet: r, auto: {shardingSize: 1, everyShardReplicas: 1}}"} {
		require.ErrorContains(t, schema.judge(t, pass+more), "spec.clientCertificates: Passthrough leaves requests unread", more)
	}
	require.NoError(t, schema.judge(t, good+`
- relateResources: [{apiGroups: [apps], resources: [deployments]}]
  selector: {matchLabels: {c: d}}
`), "one resource in two limits is fine")
}

func TestSeed(t *testing.T) {
	data, err := os.ReadFile("../compile/testdata/seed.in.yaml")
	require.NoError(t, err)
	first, _, _ := strings.Cut(string(data), "\n---\n")
	c := &v1alpha1.ShardingConfig{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(first), c))
	require.Empty(t, Config(c))
}

func handle(t *testing.T, op admissionv1.Operation, c, old *v1alpha1.ShardingConfig, existing ...client.Object) admission.Response {
	t.Helper()
	return handleAs(t, "somebody", op, c, old, existing...)
}

const manager = "system:serviceaccount:mesh:manager"

func handleAs(t *testing.T, user string, op admissionv1.Operation, c, old *v1alpha1.ShardingConfig, existing ...client.Object) admission.Response {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, corev1.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	w := &Webhook{Reader: fake.NewClientBuilder().WithScheme(scheme).WithObjects(existing...).Build(), Manager: manager, Namespace: "mesh", Settings: platform.Default}
	req := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: op, Namespace: "ns", Name: c.Name}}
	req.UserInfo.Username = user
	var err error
	req.Object.Raw, err = json.Marshal(c)
	require.NoError(t, err)
	if old != nil {
		req.OldObject.Raw, err = json.Marshal(old)
		require.NoError(t, err)
	}
	return w.Handle(t.Context(), req)
}

func pod(name string, labels map[string]string) *corev1.Pod {
	labels[v1alpha1.EnableProxyLabel] = "true"
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: labels}}
}

func TestOverlapAtAdmission(t *testing.T) {
	zero := config(t, "zero", good)
	one := config(t, "one", strings.NewReplacer(`shard: "0"`, `shard: "1"`, "[b]", "[c]").Replace(good))
	both := config(t, "both", strings.NewReplacer(`{matchLabels: {shard: "0"}}`, `{matchExpressions: [{key: shard, operator: Exists}]}`, "[b]", "[d]").Replace(good))
	tier := config(t, "tier", strings.NewReplacer(`shard: "0"`, `tier: x`, "[b]", "[e]").Replace(good))

	require.True(t, handle(t, admissionv1.Create, zero, nil).Allowed)
	require.True(t, handle(t, admissionv1.Create, zero, nil, one).Allowed)

	r := handle(t, admissionv1.Create, both, nil, one)
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "ShardingConfig one")
	require.Contains(t, r.Result.Message, "shard=1")

	require.True(t, handle(t, admissionv1.Create, tier, nil, one).Allowed, "no common key, no such pod")
	r = handle(t, admissionv1.Create, tier, nil, one, pod("p", map[string]string{"tier": "x", "shard": "1"}))
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "pod p ")
	require.True(t, handle(t, admissionv1.Create, tier, nil, one, pod("p", map[string]string{"tier": "x", "shard": "2"})).Allowed)

	elsewhere := both.DeepCopy()
	elsewhere.Namespace = "elsewhere"
	require.True(t, handle(t, admissionv1.Create, zero, nil, elsewhere).Allowed)

	// What exists can be repaired although it overlaps.
	changed := both.DeepCopy()
	changed.Spec.Limits[0].RelateResources[0].Resources = []string{"pods"}
	require.True(t, handle(t, admissionv1.Update, changed, both, one).Allowed)
}

func TestOpenIsWarnedOf(t *testing.T) {
	r := handle(t, admissionv1.Create, config(t, "zero", good+"failurePolicy: Open\n"), nil)
	require.True(t, r.Allowed)
	require.Contains(t, r.Warnings[0], "unsharded")
	require.Empty(t, handle(t, admissionv1.Create, config(t, "zero", good), nil).Warnings)
	require.Empty(t, handle(t, admissionv1.Create, config(t, "zero", "selector: {matchLabels: {a: b}}\nclientCertificates: Passthrough\nfailurePolicy: Open\n"), nil).Warnings)
}

func TestSelectorsOfPodsStay(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	require.NoError(t, schema.update(t, good, strings.Replace(good, "[b]", "[c]", 1)))
	require.ErrorContains(t, schema.update(t, good, strings.Replace(good, `shard: "0"`, `shard: "1"`, 1)), "spec.selector is immutable: delete this ShardingConfig and create another")
}

func TestUpdateDuringDeletion(t *testing.T) {
	deleted := metav1.Now()
	old := config(t, "zero", good)
	old.DeletionTimestamp, old.Finalizers = &deleted, []string{"example.com/wait"}
	released := old.DeepCopy()
	released.Finalizers = nil
	require.True(t, handle(t, admissionv1.Update, released, old).Allowed)

	changed := config(t, "zero", strings.Replace(good, "resources: [pods]", "resources: [pods/status]", 1))
	changed.DeletionTimestamp = &deleted
	r := handle(t, admissionv1.Update, changed, old)
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "write pods")

	// An object that was valid once must not be kept by what a later version refuses.
	invalid := old.DeepCopy()
	invalid.Spec.Limits = changed.Spec.Limits
	released = invalid.DeepCopy()
	released.Finalizers = nil
	require.True(t, handle(t, admissionv1.Update, released, invalid).Allowed)
}

func TestTwoShardsNeverShareALock(t *testing.T) {
	a := config(t, "b---c", strings.Replace(good, "leaderElectionName: lock", "leaderElectionName: a", 1))
	b := config(t, "c", strings.NewReplacer("leaderElectionName: lock", "leaderElectionName: a---b", `shard: "0"`, `shard: "1"`).Replace(good))
	r := handle(t, admissionv1.Create, a, nil, b)
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "a---b---c")
	require.Contains(t, r.Result.Message, "another name")
}
