package traffic

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
)

// passed returns a suite all of whose counts are as they must be.
func passed() (*suite, harness.Suite) {
	s := &suite{Operators: operator.New(nil, &harness.Result{}), counts: counts{
		injected: map[string]int{}, restarts: 2, limited: map[string]int{"cap": 7, "opens": 2}, converged: 80, objects: 80, took: time.Second,
		more: usage{goroutines: -3, sockets: 1, bytes: 2.5e6}, compares: 3, panics: map[types.UID]int{"a": 0}, takeovers: 2,
		asked: 1000, denied: 300,
	}}
	for _, kind := range faultKinds {
		s.counts.injected[kind] = 10
	}
	for _, p := range New(nil, nil).Parts {
		s.Result.Ran = append(s.Result.Ran, p.Name)
	}
	return s, harness.Suite{Name: "traffic", Counts: func() []harness.Count { return s.counts.list(s.Counts) }}
}

func TestLineOfSuccessfulRun(t *testing.T) {
	s, suite := passed()
	require.Empty(t, s.Result.Failures(suite))
	require.Equal(t, "traffic: faults=130 converged=80/80 goroutines_delta=-3 rss_delta_mb=2.5 descriptors_delta=1 kinds=13/13 converged_ms=1000 "+
		"double_writes=0 lost_objects=0 locks_lost=2 limited=9 agent_handovers=2 egress_asked=1000 egress_denied=300 egress_leaked=0 egress_refused=0 panics=0",
		s.Result.Line(suite))
}

func TestEachCountOutOfBoundsFailsTheRun(t *testing.T) {
	for _, c := range []struct {
		says  string
		spoil func(*suite)
	}{
		{"faults=0", func(s *suite) { s.counts.injected = nil }},
		{"kinds=12/13", func(s *suite) { delete(s.counts.injected, "watch_drop") }},
		{"converged=79/80", func(s *suite) { s.counts.converged-- }},
		{"converged=0/0", func(s *suite) { s.counts.converged, s.counts.objects = 0, 0 }},
		{"goroutines_delta=6", func(s *suite) { s.counts.more.goroutines = 6 }},
		{"rss_delta_mb=99.0", func(s *suite) { s.counts.more.bytes = 99e6 }},
		{"descriptors_delta=6", func(s *suite) { s.counts.more.sockets = 6 }},
		{"goroutines_delta=-3", func(s *suite) { s.counts.compares = 0 }},
		{"double_writes=1", func(s *suite) { s.Counts.DoubleWrites++ }},
		{"lost_objects=1", func(s *suite) { s.Counts.Lost++ }},
		{"locks_lost=0", func(s *suite) { s.counts.restarts = 0 }},
		{"limited=7", func(s *suite) { delete(s.counts.limited, "opens") }},
		{"agent_handovers=0", func(s *suite) { s.counts.takeovers = 0 }},
		{"egress_asked=0", func(s *suite) { s.counts.asked = 0 }},
		{"egress_denied=0", func(s *suite) { s.counts.denied = 0 }},
		{"egress_leaked=1", func(s *suite) { s.counts.leaked++ }},
		{"egress_refused=1", func(s *suite) { s.counts.refused++ }},
		{"panics=1", func(s *suite) { s.counts.panics["b"]++ }},
		{"panics=0", func(s *suite) { s.counts.panics = nil }},
	} {
		t.Run(c.says, func(t *testing.T) {
			s, suite := passed()
			c.spoil(s)
			require.Contains(t, s.Result.Failures(suite), c.says)
		})
	}
}

func TestCountsAddUpFaultsAndKeepHighestUsage(t *testing.T) {
	c := &counts{}
	c.addInjected(map[string]int{"delay": 2})
	c.addInjected(map[string]int{"delay": 1, "abort": 1})
	require.Equal(t, map[string]int{"delay": 3, "abort": 1}, c.injected)
	require.Equal(t, 2, c.kinds())

	c.addComparison(usage{goroutines: -9, sockets: -2, bytes: 1})
	c.addComparison(usage{goroutines: -1, sockets: -5, bytes: 0})
	require.Equal(t, usage{goroutines: -1, sockets: -2, bytes: 1}, c.more)
	require.True(t, c.more.withinBounds())
	require.False(t, usage{sockets: maxSockets + 1}.withinBounds())
}
