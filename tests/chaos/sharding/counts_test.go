package sharding

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
)

// passed returns a suite all of whose counts are as they must be.
func passed() (*suite, harness.Suite) {
	s := &suite{Operators: operator.New(nil, &harness.Result{}), counts: counts{
		kills: 23, partitions: 4, skew: 1.04, failovers: []time.Duration{2 * time.Second}, explored: 1000, relabelled: 50, moves: 200, edits: 200, rollouts: 1, stopped: 3, rolledBack: 3, shadowAgreed: 100, shadowFound: 1, cutOff: 5, clusterWrites: 1000, adoptions: 100, restores: 20,
	}}
	s.Counts.Handovers, s.Counts.Took = 200, map[string][]time.Duration{"scale": {time.Second}}
	for _, p := range New(nil, nil).Parts {
		s.Result.Ran = append(s.Result.Ran, p.Name)
	}
	return s, harness.Suite{Name: "sharding", Counts: func() []harness.Count { return s.counts.list(s.Counts, s.Result.Ran) }}
}

func TestLineOfSuccessfulRun(t *testing.T) {
	s, suite := passed()
	require.Empty(t, s.Result.Failures(suite))
	require.Equal(t, "sharding: handovers=200 double_writes=0 lost_objects=0 orphan_ranges=0 kills=23 partitions=4 handover_p50_ms=1000 "+
		"handover_p99_ms=1000 skew_max=1.04 failover_p99_ms=2000 states_explored=1000 subset_moves=50 written_moves=200 edits=200 rollouts=1 stopped_at_canary=3 rolled_back=3 escaped=0 shadow_agreed=100 shadow_false=0 shadow_found=1 shadow_writes_persisted=0 clusters_cut_off=5 clusters_writes=1000 clusters_double_writes=0 adoptions=100 restores=20 outside_writes=0", s.Result.Line(suite))
}

func TestEachCountOutOfBoundsFailsTheRun(t *testing.T) {
	for _, c := range []struct {
		says  string
		spoil func(*suite)
	}{
		{"handovers=199", func(s *suite) { s.Counts.Handovers-- }},
		{"double_writes=1", func(s *suite) { s.Counts.DoubleWrites++ }},
		{"lost_objects=1", func(s *suite) { s.Counts.Lost++ }},
		{"orphan_ranges=1", func(s *suite) { s.Counts.Orphans++ }},
		{"kills=19", func(s *suite) { s.counts.kills = 19 }},
		{"partitions=3", func(s *suite) { s.counts.partitions-- }},
		{"handover_p50_ms=0", func(s *suite) { s.Counts.Took = nil }},
		{"handover_p50_ms=0", func(s *suite) { s.Counts.Took = map[string][]time.Duration{"storm": {time.Second}} }},
		{"handover_p99_ms=30001", func(s *suite) { s.Counts.Took["canary"] = []time.Duration{30001 * time.Millisecond} }},
		{"skew_max=1.30", func(s *suite) { s.counts.skew = 1.3 }},
		{"skew_max=0.00", func(s *suite) { s.counts.skew = 0 }},
		{"failover_p99_ms=5001", func(s *suite) { s.counts.failovers = append(s.counts.failovers, 5001*time.Millisecond) }},
		{"failover_p99_ms=0", func(s *suite) { s.counts.failovers = nil }},
		{"states_explored=0", func(s *suite) { s.counts.explored = 0 }},
		{"subset_moves=49", func(s *suite) { s.counts.relabelled-- }},
		{"written_moves=199", func(s *suite) { s.counts.moves-- }},
		{"edits=199", func(s *suite) { s.counts.edits-- }},
		{"rollouts=0", func(s *suite) { s.counts.rollouts = 0 }},
		{"stopped_at_canary=2", func(s *suite) { s.counts.stopped-- }},
		{"rolled_back=2", func(s *suite) { s.counts.rolledBack-- }},
		{"escaped=1", func(s *suite) { s.counts.escaped++ }},
		{"shadow_agreed=99", func(s *suite) { s.counts.shadowAgreed-- }},
		{"shadow_false=1", func(s *suite) { s.counts.shadowFalse++ }},
		{"shadow_found=0", func(s *suite) { s.counts.shadowFound-- }},
		{"shadow_writes_persisted=1", func(s *suite) { s.counts.shadowPersisted++ }},
		{"clusters_cut_off=4", func(s *suite) { s.counts.cutOff-- }},
		{"clusters_writes=999", func(s *suite) { s.counts.clusterWrites-- }},
		{"clusters_double_writes=1", func(s *suite) { s.counts.clusterDoubles++ }},
		{"adoptions=99", func(s *suite) { s.counts.adoptions-- }},
		{"restores=19", func(s *suite) { s.counts.restores-- }},
		{"outside_writes=1", func(s *suite) { s.counts.outside++ }},
	} {
		t.Run(c.says, func(t *testing.T) {
			s, suite := passed()
			c.spoil(s)
			require.Contains(t, s.Result.Failures(suite), c.says)
		})
	}
}

func TestMinimumHandoversOfAllParts(t *testing.T) {
	sum := 0
	for _, n := range minHandovers {
		sum += n
	}
	require.Equal(t, 200, sum)
}

func TestCountsOfPartsThatDidNotRunAreIgnored(t *testing.T) {
	s, suite := passed()
	s.Result.Ran, s.counts = []string{"restart"}, counts{}
	*s.Counts = operator.Counts{Handovers: 10, Took: map[string][]time.Duration{"restart": {1}}}
	require.Empty(t, s.Result.Failures(suite))
	require.Contains(t, s.Result.Line(suite), " kills=- partitions=- ")
}
