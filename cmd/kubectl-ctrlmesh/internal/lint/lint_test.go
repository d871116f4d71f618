package lint

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// linted returns the problems of a file: level, document, field and message.
func linted(t *testing.T, text string) []Problem {
	t.Helper()
	documents, err := Parse("a.yaml", strings.NewReader(text))
	require.NoError(t, err)
	r, err := Run(t.Context(), documents, "default", "ctrlmesh-system")
	require.NoError(t, err)
	return r.Problems
}

const (
	shard = `
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: NAME}
spec:
  selector: {matchLabels: {shard: NAME}}
  controller: {leaderElectionName: lock}
  limits: [{relateResources: [{apiGroups: [apps], resources: [deployments]}], selector: {matchLabels: {part: PART}}}]
`
	root = `
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: root}
spec:
  root:
    prefix: root
    targetStatefulSet: op
    auto: {shardingSize: 2, everyShardReplicas: 1}
    resourceSelector: [{relateResources: [{apiGroups: [apps], resources: [deployments]}]}]
`
	breaker = `
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: CircuitBreaker
metadata: {name: breaker}
spec:
  selector: {matchLabels: {app: a}}
  rateLimitings:
  - name: all
    resourceRules: [{apiGroups: ["*"], resources: ["*"], verbs: ["*"], namespaces: ["*"]}]
    bucket: {burst: 1, interval: 10s, limit: 1}
`
	injection = `
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: FaultInjection
metadata: {name: faults}
spec:
  selector: {matchLabels: {app: a}}
  duration: 1h
  httpFault: [{name: a, match: {resources: [{resources: ["*"], verbs: [update]}]}, abort: {httpStatus: 409, percent: "5"}}]
`
	kridgeShard = `
apiVersion: kridge.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: a}
spec: {selector: {matchLabels: {a: b}}, limits: [{relateResources: [{apiGroups: [''], resources: [pods]}], selector: {matchLabels: {b: c}}}]}
`
	app = `
apiVersion: ctrlmesh.kruise.io/v1alpha1
kind: VirtualApp
metadata: {name: app}
spec: {selector: {matchLabels: {a: b}}}
`
	policy = `
apiVersion: ctrlmesh.kruise.io/v1alpha1
kind: TrafficPolicy
metadata: {name: policy}
spec: {targetVirtualApps: [{name: app}], rateLimiting: {ratePolicies: [{maxInFlight: 1, rules: {nonResourceRules: [{verbs: [get], nonResourceURLs: [/x]}]}}]}}
`
)

func shardOf(name, part string) string {
	return strings.NewReplacer("NAME", name, "PART", part).Replace(shard)
}

func TestProblemsAreThoseOfAdmission(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []Problem // Field and Message are parts
	}{
		"all kinds": {strings.Join([]string{shardOf("a0", "a"), root, breaker, injection, policy, app}, "---"), []Problem{
			{Level: Warned, Document: 6, Field: "spec.subsets", Message: "the default subset owns all namespaces"}, {Level: Warned, Document: 6, Message: "every subset reads and writes these resources"},
		}},
		"other kinds": {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n", nil},
		"a dialect":   {kridgeShard, nil},
		"a list": {"apiVersion: v1\nkind: List\nitems:\n- apiVersion: ctrlmesh.kusionstack.io/v1alpha1\n  kind: CircuitBreaker\n  metadata: {name: a}\n  spec: {selector: a}\n",
			[]Problem{{Level: Refused, Document: 1, Field: "spec.selector", Message: "must be of type object"}}},
		"not YAML":      {"# a\n---\na: b: c\n", []Problem{{Level: Refused, Document: 2, Message: "parsing YAML"}}},
		"a field twice": {strings.Replace(root, "    prefix: root\n", "    prefix: root\n    prefix: root\n", 1), []Problem{{Level: Refused, Document: 1, Message: "already set in map"}}},
		"unknown field": {strings.Replace(root, "prefix", "prefixes", 1), []Problem{
			{Level: Refused, Document: 1, Field: "spec.root.prefixes", Message: "unknown field"}, {Level: Refused, Document: 1, Field: "spec.root.prefix", Message: "Required value"},
		}},
		"unknown kind":    {"apiVersion: ctrlmesh.kusionstack.io/v1\nkind: ShardingConfig\nmetadata: {name: a}\n", []Problem{{Level: Refused, Document: 1, Message: "no kind ShardingConfig in ctrlmesh.kusionstack.io/v1"}}},
		"no name":         {strings.Replace(root, "name: root", "namespace: a", 1), []Problem{{Level: Refused, Document: 1, Field: "metadata.name", Message: "name the object"}}},
		"invalid name":    {strings.Replace(root, "name: root", "name: Root_1", 1), []Problem{{Level: Refused, Document: 1, Field: "metadata.name", Message: "lowercase"}}},
		"rule of CEL":     {strings.Replace(root, "auto: {shardingSize: 2, everyShardReplicas: 1}", "key: Namespace", 1), []Problem{{Level: Refused, Document: 1, Field: "spec.root", Message: "set spec.root.auto"}}},
		"no limits":       {strings.Replace(shardOf("a0", "a"), "limits:", "#", 1), []Problem{{Level: Refused, Document: 1, Field: "spec", Message: "spec.limits is required"}}},
		"shadow":          {shardOf("a0", "a") + "  shadow: {window: 10m}\n", []Problem{{Level: Refused, Document: 1, Field: "spec.shadow.window", Message: "must be from 1s to 5m"}}},
		"name of a rule":  {strings.Replace(breaker, "name: all", `name: "a\n"`, 1), []Problem{{Level: Refused, Document: 1, Field: "spec.rateLimitings[0].name", Message: "must be printable text"}}},
		"bound":           {strings.Replace(root, "shardingSize: 2", "shardingSize: 65", 1), []Problem{{Level: Refused, Document: 1, Field: "spec.root.auto.shardingSize", Message: "65"}}},
		"webhook":         {strings.Replace(root, "resources: [deployments]", "resources: [deployments/status]", 1), []Problem{{Level: Refused, Document: 1, Field: "resources[0]", Message: "write deployments"}}},
		"breaker":         {strings.Replace(breaker, "app: a", "app: a b", 1), []Problem{{Level: Refused, Document: 1, Field: "spec.selector", Message: "a b"}}},
		"injection":       {strings.Replace(injection, "{name: a, match", "{name: '', match", 1), []Problem{{Level: Refused, Document: 1, Field: "spec.httpFault[0].name"}}},
		"of a dialect":    {strings.Replace(kridgeShard, "b: c", "b: c d", 1), []Problem{{Level: Refused, Document: 1, Field: "spec.limits[0].selector", Message: "c d"}}},
		"no VirtualApp":   {policy, []Problem{{Level: Warned, Document: 1, Field: "spec.targetVirtualApps[0]", Message: "there is no VirtualApp app"}}},
		"a warning":       {root + "  failurePolicy: Open\n", []Problem{{Level: Warned, Document: 1, Field: "spec.failurePolicy", Message: "unsharded"}}},
		"two owners":      {shardOf("a0", "a") + "---" + shardOf("a1", "a"), []Problem{{Level: Refused, Document: 2, Field: "spec.limits", Message: "ShardingConfig a0"}}},
		"one shard":       {shardOf("a0", "a") + "---" + shardOf("a1", "b"), nil},
		"other namespace": {shardOf("a0", "a") + "---" + strings.Replace(shardOf("a1", "a"), "{name: a1}", "{name: a1, namespace: other}", 1), nil},
		"a derived shard": {strings.Replace(shardOf("a0", "a"), "{name: a0}", "{name: a0, labels: {ctrlmesh.kusionstack.io/auto-sharding-root: root}}", 1), []Problem{{Level: Refused, Document: 1, Message: "auto-sharding-root"}}},
		"settings": {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: ctrlmesh-platform}\ndata: {platform.yaml: 'sharding: {excludedResources: [deployments.apps]}'}\n---" + root,
			[]Problem{{Level: Refused, Document: 2, Message: "deployments.apps may not be divided"}}},
		"invalid settings": {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: ctrlmesh-platform}\ndata: {other: a}\n", []Problem{{Level: Refused, Document: 1, Field: "data", Message: "unknown key"}}},
	} {
		t.Run(name, func(t *testing.T) {
			got := linted(t, c.text)
			require.Len(t, got, len(c.want), "%+v", got)
			for i, want := range c.want {
				assert.Equal(t, want.Level, got[i].Level)
				assert.Equal(t, want.Document, got[i].Document)
				assert.Contains(t, got[i].Field, want.Field)
				assert.Contains(t, got[i].Message, want.Message)
			}
		})
	}
}
