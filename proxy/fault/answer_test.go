package fault

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTruncatedAnswersBreakAboveTheirSize(t *testing.T) {
	a := Answer{Truncate: 10}
	pass, _ := a.Pass(noon, 10)
	require.Equal(t, 10, pass)
	require.False(t, a.Broke, "the answer may end here")
	pass, _ = a.Pass(noon, 1)
	require.Zero(t, pass)
	require.True(t, a.Broke)
	a = Answer{Truncate: 10}
	pass, _ = a.Pass(noon, 16)
	require.Equal(t, 10, pass)
	require.True(t, a.Broke)
}

func TestResetAnswersPassNothing(t *testing.T) {
	a := Answer{Truncate: -1, ResetAfter: true}
	pass, _ := a.Pass(noon, 1)
	require.Zero(t, pass)
	require.True(t, a.Broke)
}

func TestSlowAnswersKeepTheirRate(t *testing.T) {
	a := Answer{Truncate: -1, Slow: 1000}
	require.Equal(t, 100, a.Limit(4096), "each pause is short")
	now := noon
	for range 50 {
		pass, pause := a.Pass(now, 100)
		require.Equal(t, 100, pass)
		now = now.Add(pause + 10*time.Millisecond) // a timer that is late
	}
	require.WithinDuration(t, noon.Add(5*time.Second), now, 20*time.Millisecond)
	require.True(t, a.Slowed)
	now = now.Add(time.Minute)
	_, pause := a.Pass(now, 100)
	require.Zero(t, max(0, pause), "late bytes are made up for")
	_, pause = a.Pass(now, 100)
	require.Equal(t, 100*time.Millisecond, pause, "but not all of them")
}

func TestWaitEndsWithItsFault(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(lift func(), cancel context.CancelFunc, drain func())
		took time.Duration
		want bool
	}{
		"time":   {func(func(), context.CancelFunc, func()) {}, time.Minute, true},
		"lift":   {func(lift func(), _ context.CancelFunc, _ func()) { lift() }, 1500 * time.Millisecond, true},
		"client": {func(_ func(), cancel context.CancelFunc, _ func()) { cancel() }, 1500 * time.Millisecond, false},
		"drain":  {func(_ func(), _ context.CancelFunc, drain func()) { drain() }, 1500 * time.Millisecond, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var delay atomic.Int64
				delay.Store(int64(time.Minute))
				changed, draining := make(chan struct{}), make(chan struct{})
				time.AfterFunc(1500*time.Millisecond, func() {
					c.end(func() { delay.Store(0); close(changed) }, cancel, func() { close(draining) })
				})
				start := time.Now()
				got := Wait(ctx, draining, func() <-chan struct{} { return changed }, func() time.Duration { return time.Duration(delay.Load()) })
				require.Equal(t, c.want, got)
				require.Equal(t, c.took, time.Since(start))
			})
		})
	}
}
