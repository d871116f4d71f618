// Package ticks wakes goroutines at intervals, all at the same times: to wake an idle process costs
// more than most of what it then does.
package ticks

import (
	"context"
	"time"
)

// origin makes the times those of this process: agents of all nodes must not wake, and report, at once.
var origin = time.Now()

// Every calls f now, and at the multiples of an interval until ctx ends; at once after an f that
// took longer. interval is asked after each f.
func Every(ctx context.Context, interval func() time.Duration, f func()) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			began := time.Now()
			f()
			timer.Reset(time.Until(next(began, interval())))
		}
	}
}

// Until returns the time until the next multiple of an interval.
func Until(interval time.Duration) time.Duration { return time.Until(next(time.Now(), interval)) }

// next returns the first multiple of an interval after a time.
func next(after time.Time, interval time.Duration) time.Time {
	past := (after.Sub(origin)%interval + interval) % interval // times of tests are before origin
	return after.Add(interval - past)
}
