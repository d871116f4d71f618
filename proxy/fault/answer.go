package fault

import (
	"context"
	"time"
)

const (
	// look is how often Wait checks the effective times of rules.
	look = time.Second
	// maxLag is how late bytes may be that later ones make up for, so that the rate is
	// exact although timers are not.
	maxLag = 100 * time.Millisecond
)

// Answer is the faults to inject into the bytes of an answer.
type Answer struct {
	// ResetAfter resets the connection after the answer has begun.
	ResetAfter bool
	// Truncate is the number of bytes after which the answer is broken off; below 0: it
	// is not.
	Truncate int64
	// Slow is the rate of the answer in bytes per second; 0: unlimited.
	Slow int64
	// Broke means that the answer was broken off, Slowed that bytes of it were delayed.
	Broke, Slowed bool

	passed int64
	due    time.Time // of the next byte
}

// Harmless reports whether the answer passes unchanged.
func (a *Answer) Harmless() bool { return !a.ResetAfter && a.Truncate < 0 && a.Slow == 0 }

// Limit returns how many of n bytes may pass at once.
func (a *Answer) Limit(n int) int {
	if a.Slow > 0 {
		n = int(min(int64(n), max(1, a.Slow/10))) // bounds each pause, so that lifted rules take effect
	}
	return n
}

// Pass decides about the next n bytes of the answer. It returns how many of them pass, and
// the pause after them. If not all pass, the answer is broken off.
func (a *Answer) Pass(now time.Time, n int) (pass int, pause time.Duration) {
	pass = n
	switch {
	case a.ResetAfter:
		pass = 0
	case a.Truncate >= 0:
		pass = int(min(int64(n), max(0, a.Truncate-a.passed)))
	}
	a.passed += int64(pass)
	a.Broke = a.Broke || pass < n
	if a.Slow > 0 && pass > 0 {
		a.Slowed = true
		if a.due.IsZero() {
			a.due = now
		} else if lag := now.Add(-maxLag); a.due.Before(lag) {
			a.due = lag
		}
		a.due = a.due.Add(time.Duration(pass) * time.Second / time.Duration(a.Slow))
		pause = a.due.Sub(now)
	}
	return pass, pause
}

// Wait waits for the time that left returns. lift removes the faults that are not in effect
// any more, so that left may return less; it is called again every second, and when the
// channel that it returned is closed. Wait reports false if ctx or draining ended it.
func Wait(ctx context.Context, draining <-chan struct{}, lift func() (changed <-chan struct{}), left func() time.Duration) bool {
	for start := time.Now(); ; {
		changed := lift()
		rest := left() - time.Since(start)
		if rest <= 0 {
			return true
		}
		select {
		case <-time.After(min(rest, look)):
		case <-changed:
		case <-ctx.Done():
			return false
		case <-draining:
			return false
		}
	}
}
