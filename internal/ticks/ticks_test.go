package ticks

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestEveryCallsAtMultiples(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(Until(100*time.Millisecond) + 70*time.Millisecond) // between two multiples
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		var at []time.Duration
		Every(ctx, func() time.Duration { return 100 * time.Millisecond }, func() {
			at = append(at, time.Since(start).Round(time.Millisecond))
			switch len(at) {
			case 2:
				time.Sleep(250 * time.Millisecond) // longer than the interval
			case 5:
				cancel()
			}
		})
		const ms = time.Millisecond
		require.Equal(t, []time.Duration{0, 30 * ms, 280 * ms, 330 * ms, 430 * ms}, at)
	})
}

func TestIntervalsMayChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(Until(100 * time.Millisecond))
		ctx, cancel := context.WithCancel(t.Context())
		start, interval := time.Now(), 100*time.Millisecond
		var at []time.Duration
		Every(ctx, func() time.Duration { return interval }, func() {
			at = append(at, time.Since(start).Round(time.Millisecond))
			switch len(at) {
			case 2:
				interval = 50 * time.Millisecond
			case 4:
				cancel()
			}
		})
		const ms = time.Millisecond
		require.Equal(t, []time.Duration{0, 100 * ms, 150 * ms, 200 * ms}, at)
	})
}

func TestUntilIsBounded(t *testing.T) {
	for range 100 {
		got := Until(time.Second)
		require.Positive(t, got)
		require.LessOrEqual(t, got, time.Second)
	}
}
