package kube

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// pause between two questions of Until: short at first, for what is nearly there.
const (
	minPause = 20 * time.Millisecond
	maxPause = 500 * time.Millisecond
)

// Until calls cond until it returns nil. An error of cond says what is not yet as
// it should be; the last one is returned if ctx ends first. A [Never] ends the
// waiting at once.
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
		// A question cut off by the end of ctx says less than the answer before it.
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

type neverError struct{ error }

func (e neverError) Unwrap() error { return e.error }

// Never marks an error that no waiting mends.
func Never(err error) error { return neverError{err} }
