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

// served says how soon an object of the initial list is reconciled, 0 for never within
// three minutes, beside as many others that the operator refreshes each second. Four
// workers take 15 ms for each write, as controller-runtime's queue hands objects out.
func served(t *testing.T, refreshed int) (after time.Duration) {
	const listed = -1
	begin := time.Now()
	queue := priorityqueue.New[int]("tally")
	var workers sync.WaitGroup
	var over atomic.Bool
	defer func() { // while somebody waits for an object, a queue that shuts down may hang
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

// An operator whose queue is full of objects that it refreshes never comes to one of
// its initial list: controller-runtime hands those out after all others.
func TestAFullQueueStarvesTheInitialList(t *testing.T) {
	for refreshed, starves := range map[int]bool{72: false, 240: false, 672: true} {
		synctest.Test(t, func(t *testing.T) {
			after := served(t, refreshed)
			require.Equal(t, starves, after == 0, "%d objects: after %s", refreshed, after)
			t.Logf("%d objects: after %s", refreshed, after)
		})
	}
}
