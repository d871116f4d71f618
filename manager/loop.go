package manager

import (
	"context"
	"log/slog"
	"time"
)

const (
	firstRetry = 200 * time.Millisecond
	lastRetry  = 30 * time.Second
	// longestRest is how long at most a loop rests.
	longestRest = 2 * time.Second
)

// loop runs a function when poked, when it failed, and every so often. It is a
// Runnable of the leader.
type loop struct {
	name string
	// wait after a poke, so that what comes together is done together.
	wait time.Duration
	// rests: it waits at least as long as its last run took, twice, so that what others
	// poke it for leaves them time.
	rests bool
	// every so often; 0 for never.
	every time.Duration
	run   func(context.Context) error
	log   *slog.Logger

	poked chan struct{}
}

func newLoop(log *slog.Logger, name string, wait, every time.Duration, run func(context.Context) error) *loop {
	return &loop{name: name, wait: wait, every: every, run: run, log: log, poked: make(chan struct{}, 1)}
}

// poke asks for a run. It never blocks.
func (l *loop) poke() {
	select {
	case l.poked <- struct{}{}:
	default:
	}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (l *loop) NeedLeaderElection() bool { return true }

// Start implements manager.Runnable.
func (l *loop) Start(ctx context.Context) error {
	retry := firstRetry
	for {
		next, wait, began := l.every, l.wait, time.Now()
		if err := l.run(ctx); err != nil && ctx.Err() == nil {
			l.log.Warn("a loop failed and will be run again", "loop", l.name, "after", retry, "error", err)
			next = retry
			retry = min(2*retry, lastRetry)
		} else {
			retry = firstRetry
		}
		if l.rests {
			wait = max(wait, min(2*time.Since(began), longestRest))
		}
		var timer <-chan time.Time
		if next > 0 {
			timer = time.After(next)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-timer:
			continue
		case <-l.poked:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		// What came while waiting is done by this run.
		select {
		case <-l.poked:
		default:
		}
	}
}
