package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// effect is one value, and what it must make of the chart.
type effect struct {
	set    string // KEY=JSON
	object string
	want   string // part of the object as JSON; with "no " before it, what must not be there; empty if the object must not be rendered
}

var (
	digest  = "sha256:" + strings.Repeat("0a", 32)
	manager = "Deployment " + meshSpace + "/ctrlmesh-manager"
	agent   = "DaemonSet " + meshSpace + "/ctrlmesh-agent"
	crd     = "CustomResourceDefinition /shardingconfigs.ctrlmesh.kusionstack.io"
	check   = "Job " + meshSpace + "/ctrlmesh-check-removal"
	quota   = "ResourceQuota " + meshSpace + "/ctrlmesh-critical-pods"
	monitor = "PodMonitor " + meshSpace + "/ctrlmesh-agent"
	alerts  = "PrometheusRule " + meshSpace + "/ctrlmesh"
	policy  = "NetworkPolicy " + meshSpace + "/ctrlmesh-webhooks"
)

var effects = []effect{
	{`image.registry="r.example/m"`, manager, `"image":"r.example/m/manager:dev"`},
	{`image.tag="v1"`, agent, `"image":"localhost/ctrlmesh/agent:v1"`},
	{`image.tag="v1"`, check, `"image":"localhost/ctrlmesh/manager:v1"`},
	{`image.pullPolicy="Always"`, manager, `"imagePullPolicy":"Always"`},
	{`image.pullSecrets=["s"]`, agent, `"imagePullSecrets":[{"name":"s"}]`},
	{`image.pullSecrets=["s"]`, manager, `"imagePullSecrets":[{"name":"s"}]`},
	{`image.pullSecrets=["s"]`, check, `"imagePullSecrets":[{"name":"s"}]`},
	{`image.manager.repository="ctrlmesh-manager"`, manager, `"image":"localhost/ctrlmesh/ctrlmesh-manager:dev"`},
	{`image.manager.digest="` + digest + `"`, manager, `"image":"localhost/ctrlmesh/manager:dev@` + digest + `"`},
	{`image.agent.repository="ctrlmesh-agent"`, agent, `"image":"localhost/ctrlmesh/ctrlmesh-agent:dev"`},
	{`image.agent.digest="` + digest + `"`, agent, `"image":"localhost/ctrlmesh/agent:dev@` + digest + `"`},
	{`crds.install=false`, crd, ""},
	{`dialects=false`, manager, `"args":["--dialects=false"]`},
	{`dialects=false`, "CustomResourceDefinition /virtualapps.ctrlmesh.kruise.io", ""},
	{`dialects=false`, "MutatingWebhookConfiguration /ctrlmesh-virtualapps", ""},
	{`dialects=false`, "ValidatingWebhookConfiguration /ctrlmesh", `no kridge.kusionstack.io`},
	{`dialects=false`, "ClusterRole /ctrlmesh-manager", `no trafficpolicies`},
	{`crds.keep=false`, crd, `no helm.sh/resource-policy`},
	{`manager.replicas=3`, manager, `"replicas":3`},
	{`manager.clusterDomain="corp.example"`, manager, `"args":["--cluster-domain=corp.example"]`},
	{`manager.resources={"limits":{"memory":"1Gi"}}`, manager, `"limits":{"memory":"1Gi"}`},
	{`manager.goMemLimit="768MiB"`, manager, `"value":"768MiB"`},
	{`agent.capture="iptables"`, agent, `"--capture=iptables"`},
	{`agent.tolerations=[{"key":"gpu","operator":"Exists"}]`, agent, `"tolerations":[{"key":"gpu","operator":"Exists"}]`},
	{`agent.tolerations=[]`, agent, `no tolerations`},
	{`agent.maxSurge="10%"`, agent, `"maxSurge":"10%"`},
	{`agent.accessLog=true`, agent, `"--log-level=debug"`},
	{`agent.nri.enabled=false`, agent, `no /run/nri`},
	{`agent.nri.directory="/var/run/nri"`, agent, `"path":"/var/run/nri"`},
	{`agent.watchMemory="1Gi"`, agent, `"--watch-memory=1Gi"`},
	{`agent.resources={"limits":{"memory":"1Gi"}}`, agent, `"limits":{"memory":"1Gi"}`},
	{`agent.goMemLimit="768MiB"`, agent, `"value":"768MiB"`},
	{`agent.readCertificates=true`, agent, `"DAC_READ_SEARCH"`},
	{`agent.cleanup=true`, agent, `"args":["cleanup","--wait","--pod-dir=/run/ctrlmesh-pod"]`},
	{`priorityClass.manager=""`, manager, `no priorityClassName`},
	{`priorityClass.agent="mine"`, agent, `"priorityClassName":"mine"`},
	{`priorityClass.resourceQuota.enabled=true`, quota, `"values":["system-cluster-critical","system-node-critical"]`},
	{`priorityClass.resourceQuota={"enabled":true,"pods":7}`, quota, `"pods":"7"`},
	{`stamp.extraResources=[{"apiGroups":["e.com"],"resources":["foos"]}]`, "ClusterRole /ctrlmesh-stamp-extra",
		`"rules":[{"apiGroups":["e.com"],"resources":["foos"],"verbs":["list","patch"]}]`},
	{`analysis.prometheus.url="https://p.example:9091/x"`, manager, `"args":["--analysis-prometheus-url=https://p.example:9091/x"]`},
	{`analysis.prometheus={"url":"https://p.example","tokenSecret":"t"}`, manager, `"args":["--analysis-prometheus-url=https://p.example","--analysis-prometheus-token-file=/etc/ctrlmesh/prometheus/token"]`},
	{`analysis.prometheus={"url":"https://p.example","tokenSecret":"t"}`, manager, `"volumeMounts":[{"mountPath":"/etc/ctrlmesh/prometheus","name":"prometheus","readOnly":true}]`},
	{`analysis.prometheus={"url":"https://p.example","tokenSecret":"t"}`, manager, `"sources":[{"secret":{"items":[{"key":"token","path":"token"}],"name":"t","optional":true}}]`},
	{`analysis.prometheus={"url":"https://p.example","caSecret":"c"}`, manager, `"args":["--analysis-prometheus-url=https://p.example","--analysis-prometheus-ca-file=/etc/ctrlmesh/prometheus/ca.crt"]`},
	{`analysis.prometheus={"url":"https://p.example","caSecret":"c"}`, manager, `"sources":[{"secret":{"items":[{"key":"ca.crt","path":"ca.crt"}],"name":"c","optional":true}}]`},
	{`podMonitor.enabled=true`, monitor, `"port":"metrics"`},
	{`podMonitor={"enabled":true,"labels":{"release":"p"}}`, monitor, `"release":"p"`},
	{`prometheusRule.enabled=true`, alerts, `CtrlmeshNoManager`},
	{`prometheusRule={"enabled":true,"labels":{"release":"p"}}`, alerts, `"release":"p"`},
	{`networkPolicy.enabled=false`, policy, ""},
	{`networkPolicy.apiserverCIDRs=["10.0.0.1/32"]`, policy, `"from":[{"ipBlock":{"cidr":"10.0.0.1/32"}}]`},
	{`removalCheck.enabled=false`, check, ""},
}

func TestEachValueChangesItsObject(t *testing.T) {
	base := render(t)
	for _, e := range effects {
		t.Run(e.set, func(t *testing.T) {
			obj, before := render(t, "--set-json", e.set)[e.object], base[e.object]
			if e.want == "" {
				require.NotNil(t, before, e.object)
				require.Nil(t, obj, e.object)
				return
			}
			require.NotNil(t, obj, e.object)
			is, was := asJSON(t, obj.Object), ""
			if before != nil {
				was = asJSON(t, before.Object)
			}
			if absent, ok := strings.CutPrefix(e.want, "no "); ok {
				assert.Contains(t, was, absent)
				assert.NotContains(t, is, absent)
				return
			}
			assert.NotContains(t, was, e.want)
			assert.Contains(t, is, e.want)
		})
	}
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	require.NoError(t, err)
	return string(data)
}

func TestSchemaRefusesWrongValues(t *testing.T) {
	for _, tc := range []struct{ set, message string }{
		{`agent.captur="ebpf"`, `at '/agent': additional properties 'captur' not allowed`},
		{`agnet={}`, `additional properties 'agnet' not allowed`},
		{`agent.capture="xdp"`, `at '/agent/capture': value must be one of 'auto', 'ebpf', 'iptables', 'address'`},
		{`agent.maxSurge=0`, `at '/agent/maxSurge': minimum: got 0, want 1`},
		{`manager.replicas=0`, `at '/manager/replicas': minimum: got 0, want 1`},
		{`manager.replicas="two"`, `at '/manager/replicas': got string, want integer`},
		{`image.manager.digest="latest"`, `at '/image/manager/digest': 'latest' does not match pattern`},
		{`image.pullSecrets="s"`, `at '/image/pullSecrets': got string, want array`},
		{`crds.keep="no"`, `at '/crds/keep': got string, want boolean`},
		{`stamp.extraResources=[{"resources":["foos"]}]`, `missing property 'apiGroups'`},
		{`networkPolicy.apiserverCIDRs=["10.0.0.1"]`, `at '/networkPolicy/apiserverCIDRs/0': '10.0.0.1' does not match pattern`},
		{`analysis.prometheus.url="prometheus:9090"`, `at '/analysis/prometheus/url': 'prometheus:9090' does not match pattern`},
		{`analysis.prometheus.url="https://user:password@p.example"`, `at '/analysis/prometheus/url'`},
		{`analysis.prometheus.tokenSecret="t"`, `at '/analysis/prometheus/tokenSecret': value must be ''`},
		{`agent.watchMemory="1Mi"`, `at '/agent/watchMemory': '1Mi' does not match pattern`},
		{`manager.goMemLimit="384Mi"`, `at '/manager/goMemLimit': '384Mi' does not match pattern`},
	} {
		t.Run(tc.set, func(t *testing.T) {
			_, err := template(t, chartDir, meshSpace, "--set-json", tc.set)
			require.ErrorContains(t, err, tc.message)
		})
	}
}

// value is one setting of values.yaml.
type value struct{ key, text, preset string }

// whole are values that are maps, and set as one.
var whole = map[string]bool{"manager.resources": true, "agent.resources": true}

func leaves(prefix string, values map[string]any, visit func(key string, v any)) {
	for name, v := range values {
		key := strings.TrimPrefix(prefix+"."+name, ".")
		if m, ok := v.(map[string]any); ok && len(m) > 0 && !whole[key] {
			leaves(key, m, visit)
		} else {
			visit(key, v)
		}
	}
}

// readValues returns the settings of values.yaml with their comments and defaults.
func readValues(t *testing.T) []value {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(chartDir, "values.yaml"))
	require.NoError(t, err)
	var all map[string]any
	require.NoError(t, yaml.Unmarshal(data, &all))
	presets := map[string]string{}
	leaves("", all, func(key string, v any) { presets[key] = asJSON(t, v) })
	var out []value
	var path []string
	var comment string
	for line := range strings.Lines(string(data)) {
		line = strings.TrimRight(line, "\n")
		body := strings.TrimLeft(line, " ")
		if text, ok := strings.CutPrefix(body, "# "); ok {
			comment = text
			continue
		}
		name, _, isKey := strings.Cut(body, ":")
		if !isKey || strings.HasPrefix(body, "- ") {
			continue
		}
		path = append(path[:(len(line)-len(body))/2], name)
		if preset, ok := presets[strings.Join(path, ".")]; ok {
			out = append(out, value{strings.Join(path, "."), comment, preset})
			assert.NotEmpty(t, comment, "%s has no comment", name)
		}
		comment = ""
	}
	require.Len(t, out, len(presets), "values that the comments' reader did not find")
	return out
}

func TestEveryValueIsTested(t *testing.T) {
	tested := map[string]bool{}
	for _, e := range effects {
		key, data, _ := strings.Cut(e.set, "=")
		tested[key] = true
		var inner map[string]any
		if json.Unmarshal([]byte(data), &inner) == nil {
			for name := range inner {
				tested[key+"."+name] = true
			}
		}
	}
	for _, v := range readValues(t) {
		assert.True(t, tested[v.key], "%s has no test of its effect", v.key)
	}
}

func TestSchemaHasExactlyTheValues(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(chartDir, "values.schema.json"))
	require.NoError(t, err)
	var schema map[string]any
	require.NoError(t, json.Unmarshal(data, &schema))
	definitions := schema["definitions"].(map[string]any)
	known := map[string]bool{}
	var walk func(prefix string, s map[string]any)
	walk = func(prefix string, s map[string]any) {
		if ref, ok := s["$ref"].(string); ok {
			s = definitions[strings.TrimPrefix(ref, "#/definitions/")].(map[string]any)
		}
		properties, _ := s["properties"].(map[string]any)
		if len(properties) == 0 || whole[prefix] {
			known[prefix] = true
			return
		}
		assert.Equal(t, false, s["additionalProperties"], "the schema of %q allows unknown values", prefix)
		for name, p := range properties {
			walk(strings.TrimPrefix(prefix+"."+name, "."), p.(map[string]any))
		}
	}
	walk("", schema)
	delete(known, "global") // of helm
	for _, v := range readValues(t) {
		assert.True(t, known[v.key], "the schema has no %s", v.key)
		delete(known, v.key)
	}
	assert.Empty(t, known, "the schema has values that values.yaml lacks")
}

func TestDocumentationListsEveryValue(t *testing.T) {
	page, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	for _, v := range readValues(t) {
		row := fmt.Sprintf("| `%s` | `%s` | %s |\n", v.key, v.preset, v.text)
		assert.Contains(t, string(page), row)
	}
}
