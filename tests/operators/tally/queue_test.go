package main

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/handler"
)

// served returns the time until an object of the initial list is reconciled, 0 if it is not
// within three minutes, while the operator refreshes a number of others each second. Four
// workers take objects from controller-runtime's queue, with 15 ms for each write.
func served(t *testing.T, refreshed int) (after time.Duration) {
	const listed = -1
	begin := time.Now()
	queue := priorityqueue.New[int]("tally")
	var workers sync.WaitGroup
	var over atomic.Bool
	defer func() { // a queue may hang at shutdown while a worker waits for an object
		over.Store(true)
		workers.Wait()
		queue.ShutDown()
	}()
	for i := range refreshed {
		queue.Add(i) // by their own update events
	}
	queue.AddWithOpts(priorityqueue.AddOpts{Priority: new(handler.LowPriority)}, listed)
	found := make(chan time.Duration, 1)
	for range 4 {
		workers.Go(func() {
			for !over.Load() {
				item, priority, _ := queue.GetWithPriority()
				if item == listed {
					select {
					case found <- time.Since(begin):
					default: // again
					}
				}
				time.Sleep(15 * time.Millisecond)
				queue.AddWithOpts(priorityqueue.AddOpts{After: time.Second, Priority: &priority}, item)
				queue.Done(item)
			}
		})
	}
	select {
	case after = <-found:
	case <-time.After(3 * time.Minute):
	case <-t.Context().Done():
	}
	return after
}

// An operator whose queue is full of objects that it refreshes never reconciles those of its
// initial list: controller-runtime returns these after all others.
func TestFullQueueStarvesInitialList(t *testing.T) {
	for refreshed, starves := range map[int]bool{72: false, 240: false, 672: true} {
		synctest.Test(t, func(t *testing.T) {
			after := served(t, refreshed)
			require.Equal(t, starves, after == 0, "%d objects: after %s", refreshed, after)
			t.Logf("%d objects: after %s", refreshed, after)
		})
	}
}
