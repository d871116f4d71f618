package main

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
)

func good() *result {
	r := &result{captureCounts: captureCounts{
		modes: ways, starts: 200, kills: 50, recoveries: []time.Duration{time.Second}, upgrades: 10,
		losses: 20, repaired: 20, openDirect: "ok", looked: true, held: 9, of: 9,
	}}
	for _, p := range suites["capture"] {
		r.ran = append(r.ran, p.name)
	}
	return r
}

func TestResult(t *testing.T) {
	r := good()
	require.Empty(t, r.wrong("capture"))
	require.Equal(t, "capture: modes=3 starts=200 leaked=0 agent_kills=50 unsharded=0 recover_p99_ms=1000 upgrades=10 failed=0 relists=0 "+
		"hook_losses=20 repaired=20 open_direct=ok cleanup_left=0 hostile=9/9", r.line("capture"))

	for _, c := range []struct {
		says  string
		spoil func(*result)
	}{
		{"modes=2", func(r *result) { r.modes = ways[:2] }},
		{"starts=199", func(r *result) { r.starts-- }},
		{"leaked=1", func(r *result) { r.leaked++ }},
		{"agent_kills=49", func(r *result) { r.kills-- }},
		{"unsharded=1", func(r *result) { r.unsharded++ }},
		{"recover_p99_ms=5001", func(r *result) { r.recoveries = []time.Duration{5001 * time.Millisecond} }},
		{"recover_p99_ms=0", func(r *result) { r.recoveries = nil }},
		{"upgrades=9", func(r *result) { r.upgrades-- }},
		{"failed=1", func(r *result) { r.failed++ }},
		{"relists=1", func(r *result) { r.relists++ }},
		{"hook_losses=19", func(r *result) { r.losses-- }},
		{"repaired=19", func(r *result) { r.repaired-- }},
		{"open_direct=", func(r *result) { r.openDirect = "" }},
		{"cleanup_left=1", func(r *result) { r.left = []string{"a chain"} }},
		{"left: a chain", func(r *result) { r.left = []string{"a chain"} }},
		{"cleanup_left=unknown", func(r *result) { r.looked = false }},
		{"hostile=8/9", func(r *result) { r.held-- }},
		{"hostile=0/0", func(r *result) { r.held, r.of = 0, 0 }},
		{"kills: the node is gone", func(r *result) { r.doubt("kills: the node is gone") }},
	} {
		t.Run(c.says, func(t *testing.T) {
			r := good()
			c.spoil(r)
			require.Contains(t, r.wrong("capture"), c.says)
		})
	}
}

// What did not run is not counted, and is not taken for good.
func TestResultOfSomeParts(t *testing.T) {
	r := &result{ran: []string{"cleanup"}, captureCounts: captureCounts{modes: ways, looked: true}}
	require.Empty(t, r.wrong("capture"))
	require.Contains(t, r.line("capture"), " starts=- leaked=- ")
	require.Contains(t, r.line("capture"), " cleanup_left=0 ")
	require.NotEmpty(t, (&result{}).wrong("capture"))
}

func goodSharding() *result {
	r := &result{sharding: shardingCounts{
		handovers: 200, took: []time.Duration{time.Second}, kills: 23, partitions: 4, skew: 1.04,
		failovers: []time.Duration{2 * time.Second}, explored: 1000, adoptions: 100, restores: 20,
	}}
	for _, p := range suites[shardingSuite] {
		r.ran = append(r.ran, p.name)
	}
	return r
}

func TestShardingResult(t *testing.T) {
	r := goodSharding()
	require.Empty(t, r.wrong(shardingSuite))
	require.Equal(t, "sharding: handovers=200 double_writes=0 lost_objects=0 orphan_ranges=0 kills=23 partitions=4 handover_p50_ms=1000 "+
		"handover_p99_ms=1000 skew_max=1.04 failover_p99_ms=2000 states_explored=1000 adoptions=100 restores=20 outside_writes=0", r.line(shardingSuite))

	for _, c := range []struct {
		says  string
		spoil func(*shardingCounts)
	}{
		{"handovers=199", func(c *shardingCounts) { c.handovers-- }},
		{"double_writes=1", func(c *shardingCounts) { c.doubleWrites++ }},
		{"lost_objects=1", func(c *shardingCounts) { c.lost++ }},
		{"orphan_ranges=1", func(c *shardingCounts) { c.orphans++ }},
		{"kills=19", func(c *shardingCounts) { c.kills = 19 }},
		{"partitions=3", func(c *shardingCounts) { c.partitions-- }},
		{"handover_p50_ms=0", func(c *shardingCounts) { c.took = nil }},
		{"handover_p99_ms=30001", func(c *shardingCounts) { c.took = []time.Duration{30001 * time.Millisecond} }},
		{"skew_max=1.30", func(c *shardingCounts) { c.skew = 1.3 }},
		{"skew_max=0.00", func(c *shardingCounts) { c.skew = 0 }},
		{"failover_p99_ms=5001", func(c *shardingCounts) { c.failovers = append(c.failovers, 5001*time.Millisecond) }},
		{"failover_p99_ms=0", func(c *shardingCounts) { c.failovers = nil }},
		{"states_explored=0", func(c *shardingCounts) { c.explored = 0 }},
		{"adoptions=99", func(c *shardingCounts) { c.adoptions-- }},
		{"restores=19", func(c *shardingCounts) { c.restores-- }},
		{"outside_writes=1", func(c *shardingCounts) { c.outside++ }},
	} {
		t.Run(c.says, func(t *testing.T) {
			r := goodSharding()
			c.spoil(&r.sharding)
			require.Contains(t, r.wrong(shardingSuite), c.says)
		})
	}

	sum := 0
	for _, n := range handoversOf {
		sum += n
	}
	require.Equal(t, 200, sum)
	some := &result{ran: []string{"restart"}, sharding: shardingCounts{handovers: 10, took: []time.Duration{1}}}
	require.Empty(t, some.wrong(shardingSuite))
	require.Contains(t, some.line(shardingSuite), " kills=- partitions=- ")
}

func goodTraffic() *result {
	r := &result{traffic: trafficCounts{
		injected: map[string]int{}, restarts: 2, limited: map[string]int{"cap": 7, "opens": 2}, converged: 80, objects: 80, took: time.Second,
		more: holding{goroutines: -3, sockets: 1, bytes: 2.5e6}, compares: 3, panics: map[types.UID]int{"a": 0}, handovers: 2,
		asked: 1000, denied: 300,
	}}
	for _, kind := range faultKinds {
		r.traffic.injected[kind] = 10
	}
	for _, p := range suites[trafficSuite] {
		r.ran = append(r.ran, p.name)
	}
	return r
}

func TestTrafficResult(t *testing.T) {
	r := goodTraffic()
	require.Empty(t, r.wrong(trafficSuite))
	require.Equal(t, "traffic: faults=130 converged=80/80 goroutines_delta=-3 rss_delta_mb=2.5 descriptors_delta=1 kinds=13/13 converged_ms=1000 "+
		"double_writes=0 lost_objects=0 locks_lost=2 limited=9 agent_handovers=2 egress_asked=1000 egress_denied=300 egress_leaked=0 egress_refused=0 panics=0",
		r.line(trafficSuite))

	for _, c := range []struct {
		says  string
		spoil func(*result)
	}{
		{"faults=0", func(r *result) { r.traffic.injected = nil }},
		{"kinds=12/13", func(r *result) { delete(r.traffic.injected, "watch_drop") }},
		{"converged=79/80", func(r *result) { r.traffic.converged-- }},
		{"converged=0/0", func(r *result) { r.traffic.converged, r.traffic.objects = 0, 0 }},
		{"goroutines_delta=6", func(r *result) { r.traffic.more.goroutines = 6 }},
		{"rss_delta_mb=99.0", func(r *result) { r.traffic.more.bytes = 99e6 }},
		{"descriptors_delta=6", func(r *result) { r.traffic.more.sockets = 6 }},
		{"goroutines_delta=-3", func(r *result) { r.traffic.compares = 0 }},
		{"double_writes=1", func(r *result) { r.sharding.doubleWrites++ }},
		{"lost_objects=1", func(r *result) { r.sharding.lost++ }},
		{"locks_lost=0", func(r *result) { r.traffic.restarts = 0 }},
		{"limited=7", func(r *result) { delete(r.traffic.limited, "opens") }},
		{"agent_handovers=0", func(r *result) { r.traffic.handovers = 0 }},
		{"egress_asked=0", func(r *result) { r.traffic.asked = 0 }},
		{"egress_denied=0", func(r *result) { r.traffic.denied = 0 }},
		{"egress_leaked=1", func(r *result) { r.traffic.leaked++ }},
		{"egress_refused=1", func(r *result) { r.traffic.refused++ }},
		{"panics=1", func(r *result) { r.traffic.panics["b"]++ }},
		{"panics=0", func(r *result) { r.traffic.panics = nil }},
	} {
		t.Run(c.says, func(t *testing.T) {
			r := goodTraffic()
			c.spoil(r)
			require.Contains(t, r.wrong(trafficSuite), c.says)
		})
	}
}

// All kinds of faults come alone, too.
func TestBoutsHaveAllKinds(t *testing.T) {
	alone := map[string]bool{}
	for _, b := range bouts {
		for _, kind := range b.kinds {
			alone[kind] = true
		}
	}
	require.ElementsMatch(t, faultKinds, slices.Collect(maps.Keys(alone)))
}

func TestTrafficCounts(t *testing.T) {
	c := &trafficCounts{}
	c.inject(map[string]int{"delay": 2})
	c.inject(map[string]int{"delay": 1, "abort": 1})
	require.Equal(t, map[string]int{"delay": 3, "abort": 1}, c.injected)
	require.Equal(t, 2, c.met())

	c.compared(holding{goroutines: -9, sockets: -2, bytes: 1})
	c.compared(holding{goroutines: -1, sockets: -5, bytes: 0})
	require.Equal(t, holding{goroutines: -1, sockets: -2, bytes: 1}, c.more)
	require.True(t, c.more.small())
	require.False(t, holding{sockets: maxSockets + 1}.small())
}

// Every count is taken by a part that there is, and every part takes a count but
// that which proves the judge.
func TestCountsHaveParts(t *testing.T) {
	for suite, r := range map[string]*result{"capture": good(), shardingSuite: goodSharding(), trafficSuite: goodTraffic()} {
		counted := []string{"unfenced"}
		for _, f := range r.fields(suite) {
			counted = append(counted, f.parts...)
		}
		for _, p := range suites[suite] {
			require.Contains(t, counted, p.name)
			counted = slices.DeleteFunc(counted, func(part string) bool { return part == p.name })
		}
		require.Subset(t, []string{"unfenced"}, counted, "parts that there are not")
	}
}

func TestPercentile(t *testing.T) {
	var all []time.Duration
	for i := range 100 {
		all = append(all, time.Duration(100-i))
	}
	require.Equal(t, time.Duration(99), percentile(all, 0.99))
	require.Equal(t, time.Duration(50), percentile(all[50:], 0.99))
	require.Equal(t, time.Duration(7), percentile([]time.Duration{7}, 0.99))
	require.Zero(t, percentile(nil, 0.99))
}

func TestChoose(t *testing.T) {
	parts, err := choose("capture", "cleanup,kills")
	require.NoError(t, err)
	require.Equal(t, "kills", parts[0].name)
	require.Equal(t, "cleanup", parts[1].name)
	_, err = choose("capture", "kils")
	require.ErrorContains(t, err, `no part ["kils"]`)
	_, err = choose("shading", "")
	require.ErrorContains(t, err, "no suite")
}
