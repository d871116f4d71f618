// Package wake wakes loops that wait.
package wake

import (
	"context"
	"sync"
	"time"
)

// Flag wakes one loop. Its zero value is ready to use.
type Flag struct {
	once sync.Once
	set  chan struct{} // holds one token while the flag is set
}

// Wait returns the channel from which the loop receives. To receive clears the flag.
func (f *Flag) Wait() chan struct{} {
	f.once.Do(func() { f.set = make(chan struct{}, 1) })
	return f.set
}

// Set wakes the loop, now or when it waits next. It may be called from any goroutine.
func (f *Flag) Set() {
	select {
	case f.Wait() <- struct{}{}:
	default:
	}
}

// Sleep waits until the flag is set, for a time, or until the context ends.
func (f *Flag) Sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-f.Wait():
	case <-time.After(d):
	}
}
