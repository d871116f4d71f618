// Package processors gives the runtime's scheduler as many processors as its goroutines need.
//
// Goroutines that exchange small messages are cheaper on one: with more, a goroutine that becomes
// runnable wakes a thread that looks for work, and most of these threads find none. For a proxy of
// single requests that is a fifth of its processor time.
package processors

import (
	"context"
	"os"
	"runtime"
	"runtime/metrics"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/ticks"
)

const (
	// interval is the time between two decisions.
	interval = 500 * time.Millisecond
	// noticeable is how long a goroutine may wait for a processor.
	noticeable = time.Millisecond
	// sampled is of how many waits of goroutines the runtime records one.
	sampled = 8
)

// Adapt changes GOMAXPROCS until ctx ends: to all processors that the runtime would use when
// goroutines wait for one, and to half as many after a while in which half were enough. It returns
// at once if the environment sets GOMAXPROCS.
func Adapt(ctx context.Context) {
	if os.Getenv("GOMAXPROCS") != "" {
		return
	}
	var s scale
	before := read()
	ticks.Every(ctx, func() time.Duration { return interval }, func() {
		now, processors := read(), runtime.GOMAXPROCS(0)
		switch s.next(processors, now.since(before)) {
		case all:
			runtime.SetDefaultGOMAXPROCS()
		case half:
			runtime.GOMAXPROCS(processors / 2)
		}
		before = now
	})
}

// reading is what the process has done so far.
type reading struct {
	at     time.Time
	used   time.Duration // of processors
	waited time.Duration // by goroutines that waited noticeably for one
}

func read() reading {
	var used unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &used) // it cannot fail
	latencies := []metrics.Sample{{Name: "/sched/latencies:seconds"}}
	metrics.Read(latencies)
	return reading{
		at:     time.Now(),
		used:   time.Duration(used.Utime.Nano() + used.Stime.Nano()),
		waited: sampled * noticed(latencies[0].Value.Float64Histogram()),
	}
}

// noticed returns the sum of the noticeable waits in a histogram of seconds, at least.
func noticed(h *metrics.Float64Histogram) time.Duration {
	sum := 0.0
	for i, n := range h.Counts {
		if from := h.Buckets[i]; from >= noticeable.Seconds() {
			sum += from * float64(n)
		}
	}
	return time.Duration(sum * float64(time.Second))
}

func (r reading) since(before reading) load {
	took := float64(max(r.at.Sub(before.at), 1))
	return load{used: float64(r.used-before.used) / took, waiting: float64(r.waited-before.waited) / took}
}
