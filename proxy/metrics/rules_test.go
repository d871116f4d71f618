package metrics

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

// Pods of a shard have the series of their rules together, and these go with the last.
func TestSeriesOfRulesAreDeletedWithLastPod(t *testing.T) {
	all, err := NewNode(nil)
	require.NoError(t, err)
	m := &all.Limits
	rule := Rule{"ns", "operator", "s1", "cap", "r0"}
	hold := func() Tallies { return m.Acquire(slices.Values([]Rule{rule, rule})) }
	series := func(want int) {
		t.Helper()
		require.Equal(t, want, testutil.CollectAndCount(m.counts))
	}
	value := func() float64 {
		return testutil.ToFloat64(m.counts.WithLabelValues("ns", "operator", "s1", "cap", "r0", "bucket"))
	}
	one, other := hold(), hold()
	one.Count("cap", "r0", "bucket")
	other.Count("cap", "r0", "bucket")
	other.Count("cap", "r0", "opened")
	other.Count("cap", "another", "bucket")
	series(2)
	require.Equal(t, 2.0, value())

	m.Release(one)
	one.Count("cap", "r0", "bucket") // a request goes on under the policy before
	require.Equal(t, 3.0, value())
	m.Release(other)
	series(0)
	for _, what := range []string{"bucket", "in_flight"} {
		one.Count("cap", "r0", what)
		other.Count("cap", "r0", what)
	}
	series(0)
	require.Empty(t, m.used)

	again := hold()
	one.Count("cap", "r0", "in_flight")
	series(0)
	again.Count("cap", "r0", "bucket")
	require.Equal(t, 1.0, value())
}

// Most rules of most policies never do anything, and leave without a look at the series:
// there may be many of others, and somebody who reads them.
func TestReleaseOfUnusedRulesDoesNotBlock(t *testing.T) {
	all, err := NewNode(nil)
	require.NoError(t, err)
	m := &all.Limits
	busy := m.Acquire(slices.Values([]Rule{{"ns", "operator", "s1", "cap", "busy"}}))
	busy.Count("cap", "busy", "bucket")
	busy.Count("cap", "busy", "opened")
	quiet := m.Acquire(slices.Values([]Rule{{"ns", "operator", "s1", "cap", "quiet"}}))

	read := make(chan prometheus.Metric)
	go func() {
		defer close(read)
		m.counts.Collect(read)
	}()
	<-read // the vector is locked until the rest is
	released := make(chan struct{})
	go func() {
		defer close(released)
		m.Release(quiet)
	}()
	select {
	case <-released:
	case <-time.After(10 * time.Second):
		t.Error("it waits for who reads the series")
	}
	for range read {
	}
	<-released
}

func BenchmarkRelease(b *testing.B) {
	all, err := NewNode(nil)
	require.NoError(b, err)
	m := &all.Limits
	rules := func(workload string) Tallies {
		return m.Acquire(func(yield func(Rule) bool) {
			for i := range 4096 {
				if !yield(Rule{"ns", workload, "s1", "cap", fmt.Sprint(i)}) {
					return
				}
			}
		})
	}
	other := rules("other")
	for i := range 4000 {
		other.Count("cap", fmt.Sprint(i), "bucket")
	}
	for b.Loop() {
		b.StopTimer()
		held := rules("operator")
		b.StartTimer()
		m.Release(held)
	}
}

// A flood of what a pod's rules refuse keeps nobody else waiting.
func TestCountingRulesTakesNoSharedLock(t *testing.T) {
	all, err := NewNode(nil)
	require.NoError(t, err)
	held := all.Limits.Acquire(slices.Values([]Rule{{"ns", "operator", "s1", "cap", "r0"}}))
	held.Count("cap", "r0", "bucket")
	all.Limits.mu.Lock() // as others would
	defer all.Limits.mu.Unlock()
	require.Zero(t, testing.AllocsPerRun(100, func() { held.Count("cap", "r0", "bucket") }))
}
