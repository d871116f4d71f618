package capture

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/reviews"
)

// passed returns a suite all of whose counts are as they must be.
func passed() (*suite, harness.Suite) {
	s := &suite{Result: &harness.Result{}, counts: counts{
		modes: fleet.Modes, starts: 200, kills: 50, recoveries: []time.Duration{time.Second}, upgrades: 10,
		losses: 24, repaired: 24, openDirect: "ok", left: []string{}, hostile: hostile{attacks: 9, repelled: 9, tenants: 4, tenantsRepelled: 4},
		reviewed: reviews.Verdict{Reviews: 10_000},
	}}
	exported := harness.Suite{Name: "capture", Counts: s.counts.list}
	for _, p := range New(nil, nil).Parts {
		s.Ran = append(s.Ran, p.Name)
	}
	return s, exported
}

func TestLineOfSuccessfulRun(t *testing.T) {
	s, suite := passed()
	require.Empty(t, s.Failures(suite))
	require.Equal(t, "capture: modes=3 starts=200 leaked=0 agent_kills=50 unsharded=0 recover_p99_ms=1000 upgrades=10 failed=0 relists=0 "+
		"hook_losses=24 repaired=24 open_direct=ok cleanup_left=0 hostile=9/9 tenants=4/4 reviews=10000 misrouted=0 failed=0", s.Line(suite))
}

func TestEachCountOutOfBoundsFailsTheRun(t *testing.T) {
	for _, c := range []struct {
		says  string
		spoil func(*counts)
	}{
		{"modes=2", func(c *counts) { c.modes = fleet.Modes[:2] }},
		{"starts=199", func(c *counts) { c.starts-- }},
		{"leaked=1", func(c *counts) { c.leaked++ }},
		{"agent_kills=49", func(c *counts) { c.kills-- }},
		{"unsharded=1", func(c *counts) { c.unsharded++ }},
		{"recover_p99_ms=5001", func(c *counts) { c.recoveries = []time.Duration{5001 * time.Millisecond} }},
		{"recover_p99_ms=0", func(c *counts) { c.recoveries = nil }},
		{"upgrades=9", func(c *counts) { c.upgrades-- }},
		{"failed=1", func(c *counts) { c.failed++ }},
		{"relists=1", func(c *counts) { c.relists++ }},
		{"hook_losses=23", func(c *counts) { c.losses-- }},
		{"repaired=23", func(c *counts) { c.repaired-- }},
		{"open_direct=", func(c *counts) { c.openDirect = "" }},
		{"cleanup_left=1", func(c *counts) { c.left = []string{"a chain"} }},
		{"left: a chain", func(c *counts) { c.left = []string{"a chain"} }},
		{"cleanup_left=unknown", func(c *counts) { c.left = nil }},
		{"hostile=8/9", func(c *counts) { c.repelled-- }},
		{"tenants=3/4", func(c *counts) { c.tenantsRepelled-- }},
		{"tenants=0/0", func(c *counts) { c.tenantsRepelled, c.tenants = 0, 0 }},
		{"reviews=9999", func(c *counts) { c.reviewed.Reviews-- }},
		{"misrouted=1", func(c *counts) { c.reviewed.Misrouted++ }},
		{"failed=2", func(c *counts) { c.reviewed.Failed += 2 }},
		{"reviews: a finding", func(c *counts) { c.reviewed.Failed, c.reviewed.Findings = 1, []string{"a finding"} }},
		{"hostile=0/0", func(c *counts) { c.repelled, c.attacks = 0, 0 }},
	} {
		t.Run(c.says, func(t *testing.T) {
			s, suite := passed()
			c.spoil(&s.counts)
			require.Contains(t, s.Failures(suite), c.says)
		})
	}
}

func TestDoubtFailsTheRun(t *testing.T) {
	s, suite := passed()
	s.Doubt("kills: the node is gone")
	require.Contains(t, s.Failures(suite), "kills: the node is gone")
}

func TestCountsOfPartsThatDidNotRunAreIgnored(t *testing.T) {
	s, suite := passed()
	s.Ran, s.counts = []string{"cleanup"}, counts{modes: fleet.Modes, left: []string{}}
	require.Empty(t, s.Failures(suite))
	require.Contains(t, s.Line(suite), " starts=- leaked=- ")
	require.Contains(t, s.Line(suite), " cleanup_left=0 ")
	s.Ran, s.counts = nil, counts{}
	require.NotEmpty(t, s.Failures(suite))
}
