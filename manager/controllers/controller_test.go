package controllers

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestControllerRunsWhenItFailedAndWhenTriggered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ran := make(chan struct{})
		var fail atomic.Int32
		fail.Store(2)
		var changed Signal
		c := New(slog.New(slog.DiscardHandler), Spec{
			Name: "test", Debounce: time.Millisecond, On: []Source{&changed},
			Reconcile: func(context.Context) error {
				ran <- struct{}{}
				if fail.Add(-1) >= 0 {
					return errors.New("not yet")
				}
				return nil
			},
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Start(ctx) }()
		for range 3 { // at once, and twice more because it failed
			<-ran
		}
		changed.Notify()
		changed.Notify()
		<-ran
		cancel()
		require.NoError(t, <-ended)
		require.True(t, c.NeedLeaderElection())
	})
}

// However often it is triggered, or runs by itself, a controller that rests leaves two thirds of the time to others.
func TestControllerRests(t *testing.T) {
	var changed Signal
	for name, s := range map[string]struct {
		spec      Spec
		reconcile func()
	}{
		"triggered":           {Spec{On: []Source{&changed}}, changed.Notify},
		"with something next": {Spec{Next: time.Now}, func() {}},
	} {
		t.Run(name, func(t *testing.T) {
			s.spec.Debounce, s.spec.Rests = 10*time.Millisecond, true
			runs := runsOf(t, 3100*time.Millisecond, s.spec, func(int) error {
				time.Sleep(100 * time.Millisecond)
				s.reconcile()
				return nil
			})
			require.Len(t, runs, 11)
		})
	}
}

// runsOf returns the times of the runs of a controller, as offsets from its start.
func runsOf(t *testing.T, within time.Duration, s Spec, reconcile func(run int) error, triggers ...time.Duration) (at []time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		began := time.Now()
		s.Reconcile = func(context.Context) error {
			at = append(at, time.Since(began).Truncate(time.Millisecond))
			return reconcile(len(at))
		}
		c := New(slog.New(slog.DiscardHandler), s)
		for _, d := range triggers {
			time.AfterFunc(d, c.Trigger)
		}
		require.NoError(t, c.Start(ctx))
	})
	return at
}

func TestTimesOfRuns(t *testing.T) {
	const s = time.Second
	succeed := func(int) error { return nil }
	for name, c := range map[string]struct {
		spec      Spec
		reconcile func(int) error
		triggers  []time.Duration
		want      []time.Duration
	}{
		"once":                            {Spec{}, succeed, nil, []time.Duration{0}},
		"resync counts from the last run": {Spec{Resync: 4 * s}, succeed, []time.Duration{3 * s}, []time.Duration{0, 3 * s, 7 * s}},
		"triggers debounce together":      {Spec{Debounce: s}, succeed, []time.Duration{s, s + s/2}, []time.Duration{0, 2 * s}},
		"a trigger during a run is debounced after it": {Spec{Debounce: s}, func(run int) error {
			if run == 1 {
				time.Sleep(3 * s)
			}
			return nil
		}, []time.Duration{s}, []time.Duration{0, 4 * s}},
		"a failure does not wait for the resync": {Spec{Resync: 4 * s}, func(run int) error {
			if run == 1 {
				return errors.New("not yet")
			}
			return nil
		}, nil, []time.Duration{0, firstRetry, 4*s + firstRetry, 8*s + firstRetry}},
		"a trigger does not wait for the retry": {Spec{}, func(run int) error {
			if run <= 4 { // 200, 400, 800 and 1600 ms
				return errors.New("not yet")
			}
			return nil
		}, []time.Duration{2 * s}, []time.Duration{0, 200 * time.Millisecond, 600 * time.Millisecond, 1400 * time.Millisecond, 2 * s}},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, runsOf(t, 9*s+s/2, c.spec, c.reconcile, c.triggers...))
		})
	}
}

func TestNextIsEarlierThanTheResync(t *testing.T) {
	var next time.Time
	at := runsOf(t, 9*time.Second, Spec{Resync: 10 * time.Second, Next: func() time.Time { return next }}, func(run int) error {
		next = time.Time{}
		if run == 1 {
			next = time.Now().Add(3 * time.Second)
		}
		return nil
	})
	require.Equal(t, []time.Duration{0, 3 * time.Second}, at)
}

func TestValueNotifiesOfWhatMatters(t *testing.T) {
	var v Value[int]
	var all, matters int
	v.Subscribe(func() { all++ })
	v.When(func(before, after *int) bool { return before == nil || *before != *after }).Subscribe(func() { matters++ })
	require.Nil(t, v.Load())
	for _, n := range []int{1, 1, 2} {
		v.Store(&n)
		require.Equal(t, n, *v.Load())
	}
	require.Equal(t, 3, all)
	require.Equal(t, 2, matters)
}
