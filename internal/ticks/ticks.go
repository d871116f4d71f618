// Package ticks wakes goroutines at intervals, all at the same times: to wake an idle process costs
// more than most of what it then does.
package ticks

import (
	"context"
	"time"
)

// Every calls f now, and at the multiples of an interval until ctx ends; at once after an f that
// took longer. interval is asked each time.
func Every(ctx context.Context, interval func() time.Duration, f func()) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			start, wait := time.Now(), Until(interval())
			f()
			timer.Reset(wait - time.Since(start))
		}
	}
}

// Until returns the time until the clock shows a multiple of an interval.
func Until(interval time.Duration) time.Duration {
	return interval - time.Duration(time.Now().UnixNano())%interval
}
