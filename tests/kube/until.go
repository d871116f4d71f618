package kube

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// pause is the time between two polls of Until: short at first.
const (
	minPause = 20 * time.Millisecond
	maxPause = 500 * time.Millisecond
)

// Until calls cond until it returns nil. If ctx ends first, Until returns the last error of
// cond. It returns at once if that is a [Never].
func Until(ctx context.Context, what string, cond func(context.Context) error) error {
	var last error
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		err := cond(ctx)
		if err == nil {
			return nil
		}
		if never, ok := errors.AsType[neverError](err); ok {
			return fmt.Errorf("waiting for %s: %w", what, never.error)
		}
		// The error of a call that ctx interrupted says less than the error before it.
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w (%w)", what, last, context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

// UntilWithin waits for cond for at most d.
func UntilWithin(ctx context.Context, d time.Duration, what string, cond func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return Until(ctx, what, cond)
}

// Sleep waits for d or until ctx ends. It returns the error of ctx.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	return ctx.Err()
}

type neverError struct{ error }

func (e neverError) Unwrap() error { return e.error }

// Never marks an error that is permanent.
func Never(err error) error { return neverError{err} }

// Every calls f at a steady rate until ctx ends, with the number of the call.
func Every(ctx context.Context, period time.Duration, f func(context.Context, int)) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f(ctx, i)
		}
	}
}

// InOrder takes steps one after the other, up to the first that fails.
func InOrder(ctx context.Context, steps ...func(context.Context) error) error {
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}
