package alerts

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/prometheus"
)

// elsewhere are the alerts that fire beside the end-to-end tests: make alerts.
var elsewhere = []string{
	"CtrlmeshNoManager", "CtrlmeshAgentDown", "CtrlmeshPoliciesRejected", "CtrlmeshShardWithoutLeader", "CtrlmeshShardWithoutReadyMember",
	"CtrlmeshShardingConfigNotReady", "CtrlmeshRolloutHalted", "CtrlmeshShardsSkewed", "CtrlmeshPodsNotCaptured", "CtrlmeshReviewsNotRouted",
	"CtrlmeshBreakerOpen", "CtrlmeshFaultsForLong",
}

// uncaused are the alerts that Prometheus evaluates by invented series alone, and why: make monitoring.
var uncaused = map[string]string{
	"CtrlmeshCAExpires":        "the CA is valid for ten years",
	"CtrlmeshCARotationWaits":  "a rotation waits from ten minutes on",
	"CtrlmeshHandoversBlocked": "three handovers would have to be blocked, for half a minute each, within the hurried hour",
	"CtrlmeshShardIdle":        "a shard is idle after ten minutes",
	"CtrlmeshPanics":           "no bug of the proxy is known",
}

func TestAllAlertsAreCausedOrExcused(t *testing.T) {
	groups, err := prometheus.ReadRules("../../..")
	require.NoError(t, err)
	var all []string
	for _, g := range groups {
		for _, r := range g.Rules {
			all = append(all, r.Alert)
		}
	}
	known := slices.Concat(elsewhere, slices.Collect(maps.Keys(uncaused)))
	for _, p := range parts {
		known = append(known, p.alerts...)
	}
	require.ElementsMatch(t, all, known, "cause each alert in one way")
}
