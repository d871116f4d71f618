package monitoring

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/tests/prometheus"
)

// scenario is what happens, minute by minute, and the one alert that it leads to.
type scenario struct {
	series  map[string]string // by name with labels: values in promtool's notation
	silent  time.Duration     // nothing is firing yet; 0: not asked
	fires   time.Duration
	over    time.Duration     // nothing is firing any more; 0: not asked
	labels  map[string]string // of the alert, but for severity
	summary string
}

const (
	agent  = `pod="ctrlmesh-agent-x"`
	root   = `namespace="op", shardingconfig="root"`
	member = `namespace="op", workload="od"`
	day    = 24 * time.Hour
)

var (
	ofAgent  = map[string]string{"pod": "ctrlmesh-agent-x"}
	ofRoot   = map[string]string{"namespace": "op", "shardingconfig": "root"}
	ofMember = map[string]string{"namespace": "op", "workload": "od"}
)

func with(labels map[string]string, key, value string) map[string]string {
	labels = maps.Clone(labels)
	labels[key] = value
	return labels
}

var scenarios = map[string][]scenario{
	"CtrlmeshNoManager": {
		{series: map[string]string{`ctrlmesh_manager_agents_connected{pod="m"}`: "0x9 3x9"}, silent: 4 * time.Minute, fires: 6 * time.Minute, over: 12 * time.Minute, summary: "No manager of ctrlmesh has a connected agent"},
		{series: map[string]string{`ctrlmesh_manager_agents_connected{pod="m"}`: "3 _x20"}, silent: 4 * time.Minute, fires: 16 * time.Minute, summary: "No manager of ctrlmesh has a connected agent"},
	},
	"CtrlmeshAgentDown": {{
		series: map[string]string{`up{namespace="ctrlmesh-system", ` + agent + `}`: "0x4 1x9", `up{namespace="op", pod="od-0"}`: "0x20"},
		silent: time.Minute, fires: 3 * time.Minute, over: 6 * time.Minute,
		labels: with(ofAgent, "namespace", "ctrlmesh-system"), summary: "Agent ctrlmesh-agent-x does not answer",
	}},
	"CtrlmeshAgentWithoutManager": {{
		series: map[string]string{`ctrlmesh_agent_manager_connected{` + agent + `}`: "0x14 1x9"},
		silent: 9 * time.Minute, fires: 11 * time.Minute, over: 16 * time.Minute, labels: ofAgent, summary: "Agent ctrlmesh-agent-x is not connected to a manager",
	}},
	"CtrlmeshPoliciesPending": {{
		series: map[string]string{`ctrlmesh_policies{state="pending", pod="m"}`: "2x14 0x9"},
		silent: 9 * time.Minute, fires: 11 * time.Minute, over: 16 * time.Minute, labels: map[string]string{"state": "pending"}, summary: "2 pods have not had their policy for ten minutes",
	}},
	"CtrlmeshPoliciesRejected": {{
		series: map[string]string{`ctrlmesh_policies{state="rejected", pod="m"}`: "1x4 0x9"},
		silent: time.Minute, fires: 3 * time.Minute, over: 6 * time.Minute, labels: map[string]string{"state": "rejected"}, summary: "1 pods have a policy that their agents cannot apply",
	}},
	"CtrlmeshCAExpires": {{
		series: map[string]string{`ctrlmesh_mesh_ca_expiry_timestamp_seconds{pod="m"}`: "8640000x90 400000000x20", `ctrlmesh_mesh_ca_expiry_timestamp_seconds{pod="new"}`: "0x110"},
		silent: 59 * time.Minute, fires: 61 * time.Minute, over: 95 * time.Minute, summary: "The mesh's CA expires in 99d 22h 59m 0s",
	}},
	"CtrlmeshCARotationWaits": {{
		series: map[string]string{`ctrlmesh_mesh_ca_rotation{phase="waiting", pod="m"}`: "1x10200 0x60"},
		silent: 6 * day, fires: 7*day + time.Hour, over: 7*day + 3*time.Hour, labels: map[string]string{"phase": "waiting"}, summary: "The rotation of the mesh's CA has waited for a week",
	}},
	"CtrlmeshHandoverPending": {{
		series: map[string]string{`ctrlmesh_handovers_pending{` + root + `, pod="m"}`: "1x4 0x9"},
		silent: time.Minute, fires: 3 * time.Minute, over: 6 * time.Minute, labels: ofRoot, summary: "A handover of ShardingConfig op/root makes no progress",
	}},
	"CtrlmeshShardWithoutLeader": {{
		series: map[string]string{`ctrlmesh_shard_leader{` + root + `, shard="s", pod="m"}`: "0x4 1x9"},
		fires:  2 * time.Minute, over: 6 * time.Minute, labels: with(ofRoot, "shard", "s"), summary: "Shard s of ShardingConfig op/root has no leader",
	}},
	"CtrlmeshShardWithoutReadyMember": {{
		series: map[string]string{`ctrlmesh_shard_ready_members{` + root + `, shard="s", pod="m"}`: "0x4 1x9"},
		fires:  2 * time.Minute, over: 6 * time.Minute, labels: with(ofRoot, "shard", "s"), summary: "Shard s of ShardingConfig op/root has no ready pod",
	}},
	"CtrlmeshShardingConfigNotReady": {{
		series: map[string]string{`ctrlmesh_shardingconfig_not_ready{` + root + `, reason="HeldOutside", pod="m"}`: "1x14 0x9", `ctrlmesh_shardingconfig_not_ready{namespace="op", shardingconfig="off", reason="Disabled", pod="m"}`: "1x30"},
		silent: 9 * time.Minute, fires: 11 * time.Minute, over: 16 * time.Minute, labels: with(ofRoot, "reason", "HeldOutside"), summary: "ShardingConfig op/root is not ready: HeldOutside",
	}},
	"CtrlmeshUndividedResources": {{
		series: map[string]string{`ctrlmesh_undivided_resources{` + root + `, evidence="writes", pod="m"}`: "1x14 0x9", `ctrlmesh_undivided_resources{namespace="op", shardingconfig="other", evidence="watches", pod="m"}`: "1x30"},
		silent: 9 * time.Minute, fires: 11 * time.Minute, over: 16 * time.Minute, labels: ofRoot, summary: "Several shards of ShardingConfig op/root write resources that it does not divide",
	}},
	"CtrlmeshShardIdle": {{
		series: map[string]string{`ctrlmesh_idle_shards{` + root + `, pod="m"}`: "1x14 0x9"},
		silent: 9 * time.Minute, fires: 11 * time.Minute, over: 16 * time.Minute, labels: ofRoot, summary: "1 shards of ShardingConfig op/root never write",
	}},
	"CtrlmeshRolloutHalted": {{
		series: map[string]string{`ctrlmesh_rollout_halted{` + root + `, pod="m"}`: "0x2 1x4 0x9"},
		silent: time.Minute, fires: 4 * time.Minute, over: 10 * time.Minute, labels: ofRoot, summary: "The rollout of ShardingConfig op/root has halted",
	}},
	"CtrlmeshHandoversBlocked": {{
		series: map[string]string{`ctrlmesh_handovers_total{` + root + `, result="blocked", pod="m"}`: "0x4 4x90", `ctrlmesh_handovers_total{` + root + `, result="done", pod="m"}`: "0+1x95"},
		silent: 4 * time.Minute, fires: 10 * time.Minute, over: 75 * time.Minute, labels: ofRoot, summary: "Handovers of ShardingConfig op/root are blocked repeatedly",
	}},
	"CtrlmeshShardsSkewed": {{
		series: map[string]string{`ctrlmesh_shard_skew{` + root + `, pod="m"}`: "2x400 1x20"},
		silent: 5 * time.Hour, fires: 362 * time.Minute, over: 410 * time.Minute, labels: ofRoot, summary: "The heaviest shard of op/root has 2 times the mean",
	}},
	"CtrlmeshPodsNotCaptured": {{
		series: map[string]string{`ctrlmesh_captured_pods{mode="none", ` + agent + `}`: "1x9 0x9", `ctrlmesh_captured_pods{mode="ebpf", ` + agent + `}`: "3x20"},
		silent: 4 * time.Minute, fires: 6 * time.Minute, over: 11 * time.Minute, labels: with(ofAgent, "mode", "none"), summary: "1 labelled pods are not captured by agent ctrlmesh-agent-x",
	}},
	"CtrlmeshRedirectionLost": {{
		series: map[string]string{`ctrlmesh_agent_redirection_losses_total{mode="ebpf", ` + agent + `}`: "1x20", `ctrlmesh_agent_redirection_repaired_total{mode="ebpf", ` + agent + `}`: "0x4 1x20"},
		fires:  2 * time.Minute, over: 6 * time.Minute, labels: ofAgent, summary: "Redirections of agent ctrlmesh-agent-x have no effect",
	}},
	"CtrlmeshRedirectionsBreak": {{
		series: map[string]string{`ctrlmesh_agent_redirection_losses_total{mode="ebpf", ` + agent + `}`: "0x4 5x90", `ctrlmesh_agent_redirection_repaired_total{mode="ebpf", ` + agent + `}`: "0x4 5x90"},
		silent: 4 * time.Minute, fires: 10 * time.Minute, over: 75 * time.Minute, labels: ofAgent, summary: "Redirections of agent ctrlmesh-agent-x are removed repeatedly, and it restores them",
	}},
	"CtrlmeshReviewsNotRouted": {{
		series: map[string]string{`ctrlmesh_webhook_routed{namespace="op", pod="od-0"}`: "0x9 1x9"},
		silent: 4 * time.Minute, fires: 6 * time.Minute, over: 11 * time.Minute, labels: map[string]string{"namespace": "op", "pod": "od-0"}, summary: "Admission reviews that arrive at pod op/od-0 are not routed to their shard",
	}},
	"CtrlmeshPodRefusedWithoutPolicy": {{
		series: map[string]string{`ctrlmesh_refusals_total{` + member + `, reason="no_policy", ` + agent + `}`: "0+6x20 120x20", `ctrlmesh_refusals_total{` + member + `, reason="standby", ` + agent + `}`: "0+6x40"},
		silent: 4 * time.Minute, fires: 12 * time.Minute, over: 30 * time.Minute, labels: map[string]string{"namespace": "op"}, summary: "Requests of pods in op are refused because the pods have no policy",
	}},
	"CtrlmeshApiserverAway": {{
		series: map[string]string{`ctrlmesh_upstream_errors_total{` + member + `, ` + agent + `}`: "0+60x20 1200x20"},
		silent: 9 * time.Minute, fires: 16 * time.Minute, over: 30 * time.Minute, labels: ofMember, summary: "The apiserver does not answer op/od",
	}},
	"CtrlmeshBoundsReached": {{
		series: map[string]string{`ctrlmesh_bounds_reached_total{` + member + `, bound="watches", ` + agent + `}`: "0+6x20 120x20"},
		silent: 4 * time.Minute, fires: 12 * time.Minute, over: 30 * time.Minute, labels: with(ofMember, "bound", "watches"), summary: "op/od is at the bound on watches",
	}},
	"CtrlmeshPanics": {{
		series: map[string]string{`ctrlmesh_panics_total{` + agent + `}`: "0x4 1x90"},
		silent: 4 * time.Minute, fires: 10 * time.Minute, over: 75 * time.Minute, labels: ofAgent, summary: "A request triggered a bug of agent ctrlmesh-agent-x",
	}},
	"CtrlmeshStrangers": {{
		series: map[string]string{`ctrlmesh_agent_refused_connections_total{reason="stranger", ` + agent + `}`: "0+6x25 150x20"},
		silent: 14 * time.Minute, fires: 20 * time.Minute, over: 40 * time.Minute, labels: ofAgent, summary: "Unknown clients connect to the address of agent ctrlmesh-agent-x",
	}},
	"CtrlmeshTokensRefused": {{
		series: map[string]string{`ctrlmesh_refusals_total{` + member + `, reason="token", ` + agent + `}`: "0+6x20 120x20"},
		silent: 4 * time.Minute, fires: 12 * time.Minute, over: 30 * time.Minute, labels: ofMember, summary: "op/od uses tokens of other pods",
	}},
	"CtrlmeshForeignRequestsRefused": {{
		series: map[string]string{`ctrlmesh_foreign_requests_total{` + member + `, shard="s", action="refused", ` + agent + `}`: "0+6x100 600x40", `ctrlmesh_foreign_requests_total{` + member + `, shard="s", action="observed", ` + agent + `}`: "0+6x140"},
		silent: 59 * time.Minute, fires: 75 * time.Minute, over: 120 * time.Minute, labels: with(ofMember, "shard", "s"), summary: "Shard s of op requests objects of other shards",
	}},
	"CtrlmeshBreakerOpen": {{
		series: map[string]string{`ctrlmesh_circuitbreaker_open_pods{namespace="op", circuitbreaker="cb", pod="m"}`: "2x9 0x9"},
		silent: 4 * time.Minute, fires: 6 * time.Minute, over: 11 * time.Minute, labels: map[string]string{"namespace": "op", "circuitbreaker": "cb"}, summary: "CircuitBreaker op/cb has been open in 2 pods for five minutes",
	}},
	"CtrlmeshFaultsForLong": {{
		series: map[string]string{`ctrlmesh_faultinjection_active_pods{namespace="op", faultinjection="f", pod="m"}`: "2x260 0x20"},
		silent: 3 * time.Hour, fires: 242 * time.Minute, over: 270 * time.Minute, labels: map[string]string{"namespace": "op", "faultinjection": "f"}, summary: "FaultInjection op/f has injected faults for four hours, into 2 pods",
	}},
}

// promtool's format of unit tests for rules.
type (
	unitTests struct {
		RuleFiles          []string   `json:"rule_files"`
		EvaluationInterval string     `json:"evaluation_interval"`
		Tests              []unitTest `json:"tests"`
	}
	unitTest struct {
		Name   string       `json:"name"`
		Every  string       `json:"interval"`
		Series []unitSeries `json:"input_series"`
		Alerts []unitAlert  `json:"alert_rule_test"`
	}
	unitSeries struct {
		Series string `json:"series"`
		Values string `json:"values"`
	}
	unitAlert struct {
		At     string     `json:"eval_time"`
		Name   string     `json:"alertname"`
		Firing []unitFire `json:"exp_alerts"`
	}
	unitFire struct {
		Labels      map[string]string `json:"exp_labels"`
		Annotations map[string]string `json:"exp_annotations"`
	}
)

// Each alert fires, and ends, and has the labels by which its summary says what it is about.
func TestAlertsFireAndEnd(t *testing.T) {
	t.Parallel()
	groups, err := prometheus.ReadRules("../..")
	require.NoError(t, err)
	dir := t.TempDir()
	write := func(name string, content any) string {
		data, err := yaml.Marshal(content)
		require.NoError(t, err)
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, data, 0o600))
		return path
	}
	tests := unitTests{RuleFiles: []string{write("rules.yaml", map[string]any{"groups": groups})}, EvaluationInterval: "1m"}
	var alerts []string
	for _, g := range groups {
		for _, r := range g.Rules {
			alerts = append(alerts, r.Alert)
			for i, s := range scenarios[r.Alert] {
				tests.Tests = append(tests.Tests, s.test(fmt.Sprintf("%s %d", r.Alert, i+1), r))
			}
		}
	}
	require.ElementsMatch(t, alerts, slices.Collect(maps.Keys(scenarios)))
	out, err := exec.CommandContext(t.Context(), program(t, "promtool"), "test", "rules", write("tests.yaml", tests)).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func (s scenario) test(name string, r prometheus.Rule) unitTest {
	out := unitTest{Name: name, Every: "1m"}
	for _, series := range slices.Sorted(maps.Keys(s.series)) {
		out.Series = append(out.Series, unitSeries{series, s.series[series]})
	}
	labels, annotations := maps.Clone(r.Labels), maps.Clone(r.Annotations)
	maps.Copy(labels, s.labels)
	annotations["summary"] = s.summary
	at := func(d time.Duration, firing ...unitFire) {
		out.Alerts = append(out.Alerts, unitAlert{fmt.Sprintf("%dm", int(d.Minutes())), r.Alert, firing})
	}
	if s.silent > 0 {
		at(s.silent)
	}
	at(s.fires, unitFire{labels, annotations})
	if s.over > 0 {
		at(s.over)
	}
	return out
}
