package validate

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

const rooting = `
controller: {leaderElectionName: root-lock}
root:
  prefix: op
  targetStatefulSet: op
  canary: {replicas: 1, inNamespaces: [a], inShardHash: ["3"]}
  auto: {shardingSize: 2, everyShardReplicas: 1}
  resourceSelector: [{relateResources: [{apiGroups: [""], resources: [pods]}]}]
`

func TestRoot(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	require.NoError(t, schema.judge(t, rooting))
	for says, change := range map[string][2]string{
		"spec.root.canary.inShardHash[0]: Invalid":                                     {`["3"]`, `["32"]`},
		"spec.root.resourceSelector is required":                                       {`resourceSelector: [{relateResources: [{apiGroups: [""], resources: [pods]}]}]`, ""},
		"spec.controller.leaderElectionName: Invalid":                                  {"root-lock", "Root-lock"},
		"spec.root.resourceSelector[0].selector.matchLabels: Invalid value: \"app/x/y": {`resources: [pods]}]}`, `resources: [pods]}], selector: {matchLabels: {app/x/y: a}}}`},
	} {
		changed := strings.Replace(rooting, change[0], change[1], 1)
		require.NotEqual(t, rooting, changed)
		require.ErrorContains(t, schema.judge(t, changed), says)
	}
}

// All resources of a group can be divided where objects need no labels for it.
func TestAllResourcesOfAGroup(t *testing.T) {
	all := strings.NewReplacer(`apiGroups: [""]`, `apiGroups: [example.com, example.org]`, "resources: [pods]", `resources: ["*"]`).Replace(rooting)
	for _, method := range []string{"Auto", "Filter", "ServerSide"} {
		spec := strings.Replace(all, "prefix: op", "prefix: op\n  method: "+method, 1)
		spec = strings.Replace(spec, `, inShardHash: ["3"]`, "", 1) // which no shardSelector knows
		require.Empty(t, Config(config(t, "r", spec)), method)
	}
	for what, c := range map[string]struct{ old, new, says string }{
		"Labels":      {"prefix: op", "prefix: op\n  method: Labels", "cannot carry its labels"},
		"selector":    {`resources: ["*"]}]`, `resources: ["*"]}], selector: {matchLabels: {a: b}}`, "cannot carry its labels"},
		"core group":  {"[example.com, example.org]", `[example.com, ""]`, "name the resources of the core group"},
		"all groups":  {"[example.com, example.org]", `["*"]`, "name the groups"},
		"not alone":   {`resources: ["*"]`, `resources: ["*", foos]`, "must be alone"},
		"subresource": {`resources: ["*"]`, `resources: ["*/status"]`, "write *"},
	} {
		changed := strings.Replace(all, c.old, c.new, 1)
		require.NotEqual(t, all, changed, what)
		require.ErrorContains(t, Config(config(t, "r", changed)).ToAggregate(), "spec.root.resourceSelector[0].relateResources[0].resources[0]", what)
		require.ErrorContains(t, Config(config(t, "r", changed)).ToAggregate(), c.says, what)
	}
	byHand := strings.Replace(good, `["", apps], resources: [pods]`, `[example.com], resources: ["*"]`, 1)
	require.ErrorContains(t, Config(config(t, "c", byHand)).ToAggregate(), "cannot carry its labels")

	named := strings.Replace(good, `["", apps], resources: [pods]`, `[example.com], resources: [foos]`, 1)
	root := config(t, "r", strings.Replace(all, "root-lock", "lock", 1))
	for a, b := range map[*v1alpha1.ShardingConfig]*v1alpha1.ShardingConfig{root: config(t, "a", named), config(t, "a", named): root} {
		r := handle(t, admissionv1.Create, a, nil, b)
		require.False(t, r.Allowed)
		require.Contains(t, r.Result.Message, "foos with labels {a=b} would be owned by this and by")
	}
}

func TestDefaultOnlyRequiresADefaultSubset(t *testing.T) {
	only := strings.Replace(rooting, "prefix: op", "prefix: op\n  clusterScoped: DefaultOnly", 1)
	require.ErrorContains(t, Config(config(t, "r", only)).ToAggregate(), "DefaultOnly requires subsets or targetSelector")
	schema := newCRD(t, "shardingconfigs")
	require.ErrorContains(t, schema.admit(object(t, "ShardingConfig", only)).ToAggregate(), "DefaultOnly requires spec.root.subsets or spec.root.targetSelector")
	subsets := strings.NewReplacer(`canary: {replicas: 1, inNamespaces: [a], inShardHash: ["3"]}`, "subsets: [{name: v2, podLabels: {version: v2}, namespaces: [{names: [a]}]}]",
		"auto: {shardingSize: 2, everyShardReplicas: 1}", "").Replace(only)
	require.Empty(t, Config(config(t, "r", subsets)))
	require.Empty(t, schema.admit(object(t, "ShardingConfig", subsets)))
}

func TestDefaultOnlyUserAgentsRequireADefaultSubset(t *testing.T) {
	only := strings.Replace(rooting, "prefix: op", "prefix: op\n  defaultOnlyUserAgents: [a, b/*]", 1)
	require.ErrorContains(t, Config(config(t, "r", only)).ToAggregate(), "spec.root.defaultOnlyUserAgents: Forbidden: it requires subsets or targetSelector")
	schema := newCRD(t, "shardingconfigs")
	require.ErrorContains(t, schema.admit(object(t, "ShardingConfig", only)).ToAggregate(), "defaultOnlyUserAgents requires spec.root.subsets or spec.root.targetSelector")
	subsets := strings.NewReplacer(`canary: {replicas: 1, inNamespaces: [a], inShardHash: ["3"]}`, "", "targetStatefulSet: op", "targetSelector: {matchLabels: {app: op}}",
		"auto: {shardingSize: 2, everyShardReplicas: 1}", "").Replace(only)
	require.Empty(t, Config(config(t, "r", subsets)))
	require.Empty(t, schema.admit(object(t, "ShardingConfig", subsets)))
}

func TestLongNamesOfShardsAreRefused(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	spec := strings.NewReplacer(`canary: {replicas: 1, inNamespaces: [a], inShardHash: ["3"]}`, "subsets: [{name: "+strings.Repeat("s", 22)+", podLabels: {a: b}, namespaces: [{names: [a]}]}]",
		"auto: {shardingSize: 2, everyShardReplicas: 1}", "", "prefix: op", "prefix: "+strings.Repeat("p", 40)).Replace(rooting)
	require.NoError(t, schema.judge(t, spec))
	require.ErrorContains(t, schema.judge(t, strings.Replace(spec, "name: s", "name: ss", 1)), "would have names of more than 63 characters")
}

func TestSubsetsMayDivideAllResources(t *testing.T) {
	all := strings.NewReplacer(`apiGroups: [""]`, `apiGroups: ["*"]`, "resources: [pods]", `resources: ["*"]`,
		`canary: {replicas: 1, inNamespaces: [a], inShardHash: ["3"]}`, "subsets: [{name: v2, podLabels: {version: v2}, namespaces: [{names: [a]}]}]",
		"auto: {shardingSize: 2, everyShardReplicas: 1}", "").Replace(rooting)
	require.Empty(t, Config(config(t, "r", all)))
	byLabels := strings.Replace(all, "prefix: op", "prefix: op\n  method: Labels", 1)
	require.ErrorContains(t, Config(config(t, "r", byLabels)).ToAggregate(), "cannot carry its labels")
}

func TestWhatARootIsKnownByStays(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	const byLabels = "root: {prefix: op, targetSelector: {matchLabels: {app: op}}, resourceSelector: [{relateResources: [{apiGroups: [a], resources: [b]}]}]}"
	for name, c := range map[string]struct{ old, from, to, says string }{
		"prefix":             {rooting, "prefix: op", "prefix: other", "spec.root.prefix: Invalid value: \"other\": is immutable"},
		"workload":           {rooting, "targetStatefulSet: op", "targetStatefulSet: other", "the workload in spec.root.targetRef or spec.root.targetStatefulSet is immutable"},
		"kind of workload":   {rooting, "targetStatefulSet: op", "targetRef: {kind: Deployment, name: op}", "the workload in spec.root.targetRef or spec.root.targetStatefulSet is immutable"},
		"pods for workload":  {rooting, "targetStatefulSet: op", "targetSelector: {matchLabels: {app: op}}", "spec.root.targetSelector is immutable"},
		"pods":               {byLabels, "app: op", "app: other", "spec.root.targetSelector is immutable"},
		"key":                {rooting, "prefix: op", "prefix: op\n  key: Object", "spec.root.key is immutable"},
		"no root":            {rooting + "\nselector: {matchLabels: {a: b}}", rooting, "", "whether spec.root is set is immutable"},
		"another name of it": {rooting, "targetStatefulSet: op", "key: Namespace\n  targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: op}", ""},
		"same pods":          {byLabels, "prefix: op", "prefix: op, disable: true", ""},
	} {
		t.Run(name, func(t *testing.T) {
			changed := strings.Replace(c.old, c.from, c.to, 1)
			require.NotEqual(t, c.old, changed)
			if err := schema.update(t, c.old, changed); c.says == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.says)
			}
		})
	}
}

func TestRootsAmongOthers(t *testing.T) {
	root := config(t, "r", rooting)
	refused := func(says string, c *v1alpha1.ShardingConfig, existing ...*v1alpha1.ShardingConfig) {
		t.Helper()
		for _, e := range existing {
			r := handle(t, admissionv1.Create, c, nil, e)
			require.False(t, r.Allowed, says)
			require.Contains(t, r.Result.Message, says)
		}
	}
	other := strings.NewReplacer("root-lock", "other-lock", "targetStatefulSet: op", "targetStatefulSet: other").Replace(rooting)
	refused("another prefix", config(t, "r2", other), root)
	refused("StatefulSet op is divided by ShardingConfig r already", config(t, "r2", strings.NewReplacer("root-lock", "other-lock", "prefix: op", "prefix: other").Replace(rooting)), root)
	require.True(t, handle(t, admissionv1.Create, config(t, "r2", strings.Replace(other, "prefix: op", "prefix: other", 1)), nil, root).Allowed)
	refused("is named op-1-normal, as is another", root, config(t, "op-1-normal", good))
	refused("choose another name", config(t, "op-1-normal", good), root)
	refused("would have its name", config(t, "op-1-normal", rooting), config(t, "zero", good))

	yes := true
	running := pod("op-0", map[string]string{"shard": "0"})
	running.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "op", Controller: &yes, UID: "1"}}
	for c, existing := range map[*v1alpha1.ShardingConfig]*v1alpha1.ShardingConfig{root: config(t, "zero", good), config(t, "zero", good): root} {
		r := handle(t, admissionv1.Create, c, nil, existing, running)
		require.False(t, r.Allowed)
		require.Contains(t, r.Result.Message, "pod op-0 ")
		ended := running.DeepCopy()
		ended.Status.Phase = corev1.PodSucceeded
		require.True(t, handle(t, admissionv1.Create, c, nil, existing, ended).Allowed)
	}
}

func TestRootsThatSelectOnePodAreRefused(t *testing.T) {
	root := func(name string) *v1alpha1.ShardingConfig {
		return config(t, name, `
controller: {leaderElectionName: `+name+`}
root:
  prefix: `+name+`
  targetSelector: {matchLabels: {app: op}}
  resourceSelector: [{relateResources: [{apiGroups: [""], resources: [pods]}]}]
`)
	}
	r := handle(t, admissionv1.Create, root("two"), nil, root("one"), pod("op-a", map[string]string{"app": "op"}))
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "pod op-a belongs to ShardingConfig one already")
	r = handle(t, admissionv1.Create, root("two"), nil, root("one"))
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "spec.root.targetSelector: a pod with labels {app=op} would be selected by this and by ShardingConfig one")
	other := root("two")
	other.Spec.Root.TargetSelector.MatchLabels["app"] = "other"
	require.True(t, handle(t, admissionv1.Create, other, nil, root("one"), pod("op-a", map[string]string{"app": "op"})).Allowed)
	// Both exist, and one gets an annotation.
	changed := root("two")
	changed.Annotations = map[string]string{"a": "b"}
	require.True(t, handle(t, admissionv1.Update, changed, root("two"), root("one")).Allowed)
}

// An object that was valid once, or is of a dialect, gets its finalizer and a status although it
// is invalid now.
func TestManagerWritesInvalidObjects(t *testing.T) {
	old := config(t, "r", rooting)
	old.Spec.Root.ResourceSelector[0].RelateResources = nil
	finalized := old.DeepCopy()
	finalized.Finalizers = []string{v1alpha1.HandoverFinalizer}
	require.True(t, handleAs(t, manager, admissionv1.Update, finalized, old).Allowed)
	require.False(t, handle(t, admissionv1.Update, finalized, old).Allowed)
}

func TestLimitsOfNamespacesRequireARoot(t *testing.T) {
	c := config(t, "c", good)
	c.Spec.Limits[0].Namespaces = []v1alpha1.NamespaceMatch{{Names: []string{"a"}}}
	require.ErrorContains(t, Config(c).ToAggregate(), "spec.limits[0].namespaces: Forbidden: only shards of a root can be limited by namespace")
	c = config(t, "r", rooting)
	c.Spec.Root.ResourceSelector[0].Namespaces = []v1alpha1.NamespaceMatch{{Pattern: "("}}
	require.ErrorContains(t, Config(c).ToAggregate(), "spec.root.resourceSelector[0].namespaces[0].pattern: Invalid value")
}

func TestDerivedShardsAreTheManagers(t *testing.T) {
	root := config(t, "r", rooting)
	child := config(t, "op-1-normal", `
selector: {matchLabels: {ctrlmesh.kusionstack.io/shard: op-1-normal}}
controller: {leaderElectionName: root-lock}
limits: [{relateResources: [{apiGroups: [""], resources: [pods]}]}]
`)
	child.Labels = map[string]string{v1alpha1.RootLabel: "r"}
	changed := child.DeepCopy()
	changed.Spec.Isolation = v1alpha1.IsolationOff
	unmarked := child.DeepCopy()
	unmarked.Labels = nil
	finalized := child.DeepCopy()
	finalized.Finalizers = []string{"foregroundDeletion"}

	require.True(t, handleAs(t, manager, admissionv1.Create, child, nil, root).Allowed)
	require.True(t, handleAs(t, manager, admissionv1.Update, changed, child, root).Allowed)
	require.True(t, handleAs(t, "system:serviceaccount:kube-system:generic-garbage-collector", admissionv1.Update, finalized, child, root).Allowed)
	require.True(t, handle(t, admissionv1.Update, root, root, child).Allowed, "its own shards are not in its way")

	going := changed.DeepCopy()
	now := metav1.Now()
	going.DeletionTimestamp = &now
	for _, c := range []*v1alpha1.ShardingConfig{changed, unmarked, going} {
		r := handle(t, admissionv1.Update, c, child, root)
		require.False(t, r.Allowed)
		require.Contains(t, r.Result.Message, "change spec.root of ShardingConfig r")
	}
	require.False(t, handle(t, admissionv1.Update, child, unmarked, root).Allowed)
	r := handle(t, admissionv1.Create, child, nil, root)
	require.False(t, r.Allowed)
	require.Contains(t, r.Result.Message, "remove the label")
}

func TestTwoOwners(t *testing.T) {
	shard := func(name, selector string) *v1alpha1.ShardingConfig {
		return config(t, name, `
selector: {matchLabels: {shard: "`+name+`"}}
controller: {leaderElectionName: lock}
limits: [{relateResources: [{apiGroups: ["", apps], resources: [pods, deployments]}], selector: {`+selector+`}}]
`)
	}
	named := func(op, values string) string {
		return "matchExpressions: [{key: ctrlmesh.kusionstack.io/namespace, operator: " + op + ", values: [" + values + "]}]"
	}
	labelled := func(value string) string { return "matchLabels: {ctrlmesh.kusionstack.io/namespace: " + value + "}" }
	hashed := func(op, values string) string {
		return "matchExpressions: [{key: ctrlmesh.kusionstack.io/sharding-hash, operator: " + op + ", values: [" + values + "]}]"
	}
	for _, c := range []struct{ a, b, says string }{
		{named("In", "a, b"), named("In", "c"), ""},
		{named("In", "a, b"), named("In", "b, c"), "namespace=b"},
		{named("In", "a, b"), named("NotIn", "a, b"), ""},
		{named("In", "a, b"), named("NotIn", "a"), "namespace=b"},
		{named("NotIn", "a"), named("NotIn", "b"), "namespace=example-0"},
		{hashed("In", `"1", "2"`), hashed("NotIn", `"1", "2"`), ""},
		{hashed("In", `"1", "2"`), hashed("In", `"2", "3"`), "sharding-hash=2"},
		{named("In", "default"), hashed("In", `"13"`), "namespace=default"}, // is in 13
		{named("In", "default"), hashed("NotIn", `"13"`), ""},
		{labelled("a"), labelled("b"), ""},
		{labelled("a"), named("In", "a, b"), "namespace=a"},
		{labelled("a"), named("NotIn", "a"), ""},
		{labelled("default"), hashed("NotIn", `"13"`), ""},
		{"matchLabels: {app: x}", "matchLabels: {app: z}", ""},
		{"matchLabels: {app: x}", "matchLabels: {tier: z}", "app=x,tier=z"},
		{named("In", "a") + ", matchLabels: {app: x}", named("In", "a") + ", matchLabels: {app: z}", ""},
	} {
		a, b := shard("a", c.a), shard("b", c.b)
		for _, pair := range [][2]*v1alpha1.ShardingConfig{{a, b}, {b, a}} {
			r := handle(t, admissionv1.Create, pair[0], nil, pair[1])
			require.Equal(t, c.says == "", r.Allowed, "%s and %s: %v", c.a, c.b, r.Result)
			if c.says != "" {
				require.Contains(t, r.Result.Message, c.says)
			}
		}
	}

	a, b := shard("a", named("In", "a")), shard("b", named("In", "b"))
	both := shard("b", named("In", "a, b"))
	require.False(t, handle(t, admissionv1.Update, both, b, a).Allowed, "an update is checked against the others")
	require.True(t, handle(t, admissionv1.Update, both, both, a).Allowed, "an existing overlap can be repaired")
	elsewhere := both.DeepCopy()
	elsewhere.Spec.Controller.LeaderElectionName = "another"
	require.True(t, handle(t, admissionv1.Create, elsewhere, nil, a).Allowed, "another operator")
	services := both.DeepCopy()
	services.Spec.Limits[0].RelateResources[0].Resources = []string{"services"}
	require.True(t, handle(t, admissionv1.Create, services, nil, a).Allowed, "nothing in common")
	star := both.DeepCopy()
	star.Spec.Limits[0].RelateResources[0] = v1alpha1.ResourceGroup{APIGroups: []string{"*"}, Resources: []string{"deployments"}}
	require.Contains(t, handle(t, admissionv1.Create, star, nil, a).Result.Message, "deployments")
	root := config(t, "r", strings.Replace(rooting, "root-lock", "lock", 1))
	require.Contains(t, handle(t, admissionv1.Create, a, nil, root).Result.Message, "would be owned by this and by ShardingConfig r")

	unnamed := root.DeepCopy()
	unnamed.Spec.Controller = nil
	require.True(t, handle(t, admissionv1.Create, a, nil, unnamed).Allowed)
	unnamed.Status.Locks = []v1alpha1.LockStatus{{Namespace: "ns", Name: "lock", Discovered: true}}
	require.Contains(t, handle(t, admissionv1.Create, a, nil, unnamed).Result.Message, "which shares the lock lock")
	shadow := a.DeepCopy()
	shadow.Spec.Shadow = &v1alpha1.Shadow{}
	require.True(t, handle(t, admissionv1.Create, shadow, nil, root).Allowed, "a shadow owns nothing")
}

// Reviews come from anybody, whatever the schema permits.
func TestShardsOutOfBoundsAreNotNamed(t *testing.T) {
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a"}, Spec: v1alpha1.ShardingConfigSpec{
		Controller: &v1alpha1.ControllerConfig{LeaderElectionName: "INVALID"},
		Root:       &v1alpha1.RootConfig{Prefix: "a", TargetStatefulSet: "a", Auto: &v1alpha1.AutoConfig{ShardingSize: math.MaxInt32, EveryShardReplicas: 1}},
	}}
	errs := Config(c).ToAggregate()
	require.ErrorContains(t, errs, "spec.root.auto.shardingSize")
	require.NotContains(t, errs.Error(), "the shard lock would be")
	require.Len(t, locks(c), layout.MaxShards, "an old object is judged, too")
}

// A few hundred bytes of groups and resources have thousands of pairs.
func TestPairsOfGroupAndResourceAreFew(t *testing.T) {
	c := config(t, "r", rooting)
	var many []string
	for i := range 64 {
		many = append(many, fmt.Sprint("r", i))
	}
	limits := []v1alpha1.ObjectLimiter{{RelateResources: slices.Repeat([]v1alpha1.ResourceGroup{{APIGroups: many, Resources: many}}, 3)}}
	c.Spec.Root.ResourceSelector = limits
	require.Empty(t, Config(c))
	c.Spec.Limits = limits
	errs := Config(c)
	require.Len(t, errs, 1)
	require.ErrorContains(t, errs[0], "24576 pairs of group and resource, and at most 16384 are supported")
}

func TestAnalysisQueriesAreValidated(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	for queries, says := range map[string]string{
		`[{name: errors, query: up, max: "5"}]`:                                "",
		`[{name: errors, query: up, min: "-0.5", max: "-0.5"}]`:                "",
		`[{name: a, query: up, min: "9.5"}, {name: b, query: up, max: "10"}]`:  "",
		`[{name: errors, query: up, min: "10", max: "9.5"}]`:                   "min must not exceed max",
		`[{name: errors, query: up}]`:                                          "set min or max",
		`[{name: errors, query: up, max: "1e3"}]`:                              "queries[0].max",
		`[{name: errors, query: up, max: ".5"}]`:                               "queries[0].max",
		`[{name: errors, query: up, max: 5}]`:                                  "queries[0].max",
		`[{name: errors, query: up, max: "` + strings.Repeat("1", 33) + `"}]`:  "queries[0].max",
		`[{name: Errors, query: up, max: "5"}]`:                                "queries[0].name",
		`[{name: "a\nb", query: up, max: "5"}]`:                                "queries[0].name",
		`[{query: up, max: "5"}]`:                                              "queries[0].name",
		`[{name: errors, query: "", max: "5"}]`:                                "queries[0].query",
		`[{name: errors, query: ` + strings.Repeat("u", 2049) + `, max: "5"}]`: "queries[0].query",
		`[{name: a, query: up, max: "5"}, {name: a, query: up, max: "6"}]`:     "Duplicate value",
		`[` + strings.Repeat(`{name: a, query: up, max: "5"},`, 9) + `]`:       "must have at most 8 items",
	} {
		spec := strings.Replace(rooting, "prefix: op", "prefix: op\n  rollout: {analysis: {queries: "+queries+"}}", 1)
		errs := schema.admit(object(t, "ShardingConfig", spec))
		if says == "" {
			require.Empty(t, errs, queries)
			require.Empty(t, Config(config(t, "r", spec)), queries)
		} else {
			require.ErrorContains(t, errs.ToAggregate(), says, queries)
		}
	}
}
