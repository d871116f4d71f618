package proxy

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
)

// Pods of a shard have the series of their rules together, and these go with the last.
func TestSeriesLiveAsLongAsTheirRules(t *testing.T) {
	all, err := newMetrics(nil)
	require.NoError(t, err)
	m := &all.limits
	rule := ruleSeries{"ns", "operator", "s1", "cap", "r0"}
	hold := func() tallies { return m.hold(slices.Values([]ruleSeries{rule, rule})) }
	series := func(want int) {
		t.Helper()
		require.Equal(t, want, testutil.CollectAndCount(m.counts))
	}
	value := func() float64 {
		return testutil.ToFloat64(m.counts.WithLabelValues("ns", "operator", "s1", "cap", "r0", "bucket"))
	}
	one, other := hold(), hold()
	one.count("cap", "r0", "bucket")
	other.count("cap", "r0", "bucket")
	other.count("cap", "r0", "opened")
	other.count("cap", "another", "bucket")
	series(2)
	require.Equal(t, 2.0, value())

	m.release(one)
	one.count("cap", "r0", "bucket") // a request goes on under the policy before
	require.Equal(t, 3.0, value())
	m.release(other)
	series(0)
	for _, what := range []string{"bucket", "in_flight"} {
		one.count("cap", "r0", what)
		other.count("cap", "r0", what)
	}
	series(0)
	require.Empty(t, m.held)

	again := hold()
	one.count("cap", "r0", "in_flight")
	series(0)
	again.count("cap", "r0", "bucket")
	require.Equal(t, 1.0, value())
}

// Most rules of most policies never do anything, and leave without a look at the series:
// there may be many of others, and somebody who reads them.
func TestRulesThatDidNothingLeaveAtOnce(t *testing.T) {
	all, err := newMetrics(nil)
	require.NoError(t, err)
	m := &all.limits
	busy := m.hold(slices.Values([]ruleSeries{{"ns", "operator", "s1", "cap", "busy"}}))
	busy.count("cap", "busy", "bucket")
	busy.count("cap", "busy", "opened")
	quiet := m.hold(slices.Values([]ruleSeries{{"ns", "operator", "s1", "cap", "quiet"}}))

	read := make(chan prometheus.Metric)
	go func() {
		defer close(read)
		m.counts.Collect(read)
	}()
	<-read // the vector is locked until the rest is
	released := make(chan struct{})
	go func() {
		defer close(released)
		m.release(quiet)
	}()
	select {
	case <-released:
	case <-time.After(soon):
		t.Error("it waits for who reads the series")
	}
	for range read {
	}
	<-released
}

func BenchmarkPolicyLeaves(b *testing.B) {
	all, err := newMetrics(nil)
	require.NoError(b, err)
	m := &all.limits
	rules := func(workload string) tallies {
		return m.hold(func(yield func(ruleSeries) bool) {
			for i := range 4096 {
				if !yield(ruleSeries{"ns", workload, "s1", "cap", fmt.Sprint(i)}) {
					return
				}
			}
		})
	}
	other := rules("other")
	for i := range 4000 {
		other.count("cap", fmt.Sprint(i), "bucket")
	}
	for b.Loop() {
		b.StopTimer()
		held := rules("operator")
		b.StartTimer()
		m.release(held)
	}
}

// A flood of what a pod's rules refuse keeps nobody else waiting.
func TestCountingTakesNoSharedLock(t *testing.T) {
	all, err := newMetrics(nil)
	require.NoError(t, err)
	held := all.limits.hold(slices.Values([]ruleSeries{{"ns", "operator", "s1", "cap", "r0"}}))
	held.count("cap", "r0", "bucket")
	all.limits.mu.Lock() // as others would
	defer all.limits.mu.Unlock()
	require.Zero(t, testing.AllocsPerRun(100, func() { held.count("cap", "r0", "bucket") }))
}

func BenchmarkFaultsCounted(b *testing.B) {
	m := newMesh(b, &recorder{})
	var pods atomic.Int32
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		p := m.server.Pod(PodInfo{UID: "uid", Namespace: fmt.Sprint("ns-", pods.Add(1)), Name: "p"}, m.dial)
		_, err := p.SetPolicy(&meshv1.PodPolicy{Uid: "uid", Workload: "operator", Version: "v", Traffic: &meshv1.Traffic{
			Injections: []*meshv1.Injection{{Name: "chaos", Rules: []*meshv1.FaultRule{{Name: "r0", Key: "k"}}}},
		}})
		if err != nil {
			b.Error(err)
			return
		}
		pol := p.policy.Load()
		for pb.Next() {
			pol.countFault(fault.Injected{Injection: "chaos", Rule: "r0", Kind: fault.Delay})
		}
	})
}
