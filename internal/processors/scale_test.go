package processors

import (
	"context"
	"math"
	"runtime"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestScale(t *testing.T) {
	idle, busy, queue := load{used: 0.05}, load{used: 0.9}, load{used: 0.1, waiting: 2}
	repeat := func(n int, l load) (all []load) {
		for range n {
			all = append(all, l)
		}
		return all
	}
	for name, test := range map[string]struct {
		processors int
		loads      []load
		want       change // after the last of them, none before
	}{
		"an idle process needs half":                       {8, repeat(calm, idle), half},
		"but not soon":                                     {8, repeat(calm-1, idle), none},
		"one processor is the least":                       {1, repeat(2*calm, idle), none},
		"a processor in use needs more":                    {1, repeat(patience, busy), all},
		"goroutines that wait need more":                   {4, repeat(patience, queue), all},
		"one interval is no reason":                        {1, append(repeat(1, queue), repeat(calm, idle)...), none},
		"nor are several with pauses":                      {1, []load{queue, idle, busy, idle, queue}, none},
		"half must be enough for what is in use":           {2, repeat(2*calm, load{used: 0.5}), none},
		"calm is interrupted":                              {8, append(append(repeat(calm-1, idle), queue), repeat(calm-1, idle)...), none},
		"seven processors in use of 16 leave half too few": {16, repeat(2*calm, load{used: 7}), none},
	} {
		t.Run(name, func(t *testing.T) {
			var s scale
			for i, l := range test.loads {
				want := none
				if i == len(test.loads)-1 {
					want = test.want
				}
				require.Equal(t, want, s.next(test.processors, l), "after %d intervals", i+1)
			}
		})
	}
}

func TestNoticedCountsLongWaitsOnly(t *testing.T) {
	h := &metrics.Float64Histogram{Counts: []uint64{7, 1000, 2, 3}, Buckets: []float64{math.Inf(-1), 0.0001, 0.001, 0.01, math.Inf(1)}}
	require.Equal(t, 32*time.Millisecond, noticed(h))
}

// TestAdaptGivesAllProcessorsBack changes the GOMAXPROCS of all tests of the package.
func TestAdaptGivesAllProcessorsBack(t *testing.T) {
	t.Cleanup(runtime.SetDefaultGOMAXPROCS)
	usual := runtime.GOMAXPROCS(0)
	if usual == 1 {
		t.Skip("needs two processors")
	}
	runtime.GOMAXPROCS(1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go Adapt(ctx)
	for range 4 {
		go func() {
			for ctx.Err() == nil {
			}
		}()
	}
	require.Eventually(t, func() bool { return runtime.GOMAXPROCS(0) == usual }, 30*time.Second, 10*time.Millisecond)
}
