// Package stall measures how long a machine delays a test, for tests of how long something
// may take.
package stall

import (
	"sync"
	"testing"
	"time"
)

// interval is how often a delay is measured. A process that waits for a processor is late
// each time.
const interval = 5 * time.Millisecond

// Meter measures from Measure until the test ends.
type Meter struct {
	mu    sync.Mutex
	last  time.Time // of the last measurement
	total time.Duration
}

// Measure starts to measure.
func Measure(t testing.TB) *Meter {
	m := &Meter{last: time.Now()}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(interval):
				m.Total()
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-stopped
	})
	return m
}

// Total returns by how much the machine was late until now. Something that took longer than
// it may, and not by more than this, was not slow itself.
func (m *Meter) Total() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	m.total += max(0, now.Sub(m.last)-interval)
	m.last = now
	return m.total
}
