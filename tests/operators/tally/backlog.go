package main

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	backlogEvery = 5 * time.Second
	// backlogAfter is how long an object must have waited in the queue to be reported.
	backlogAfter = 10 * time.Second
)

// backlog reports objects that are in the operator's cache but not reconciled, because its
// queue returns others first. An object that is neither reported nor reconciled never reached
// the cache, or its reconciles fail.
type backlog struct {
	client.Reader // the cache
	pod           string

	mu sync.Mutex
	// begun is when the last reconcile of an object began.
	begun map[types.NamespacedName]time.Time
	// since is when an object was first seen with something to reconcile.
	since map[types.NamespacedName]time.Time
}

func newBacklog(cache client.Reader, pod string) *backlog {
	return &backlog{Reader: cache, pod: pod, begun: map[types.NamespacedName]time.Time{}, since: map[types.NamespacedName]time.Time{}}
}

// began records that an object left the queue.
func (b *backlog) began(object types.NamespacedName) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.begun[object] = time.Now()
}

// Start implements manager.Runnable. It runs while this pod leads.
func (b *backlog) Start(ctx context.Context) error {
	tick := time.NewTicker(backlogEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		waiting, err := b.waiting(ctx, time.Now())
		if err != nil {
			return err
		}
		if len(waiting) > 0 {
			slog.Warn(v1.BacklogMessage, "seconds", waiting)
		}
	}
}

// waiting returns how many seconds objects have waited in the queue, by namespace/name.
func (b *backlog) waiting(ctx context.Context, now time.Time) (map[string]float64, error) {
	var list v1.TallyList
	if err := b.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("listing objects in the cache: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	since := map[types.NamespacedName]time.Time{}
	begun := map[types.NamespacedName]time.Time{}
	out := map[string]float64{}
	for i := range list.Items {
		t := &list.Items[i]
		key := client.ObjectKeyFromObject(t)
		if at, ok := b.begun[key]; ok {
			begun[key] = at
		}
		if t.Status.Generations[b.pod] >= t.Generation {
			continue
		}
		first, ok := b.since[key]
		if !ok || begun[key].After(first) {
			first = now
		}
		since[key] = first
		if waited := now.Sub(first); waited >= backlogAfter {
			out[key.String()] = math.Round(waited.Seconds())
		}
	}
	b.since, b.begun = since, begun
	return out, nil
}
