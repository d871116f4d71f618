package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	writeEvery = 100 * time.Millisecond
	lookEvery  = 500 * time.Millisecond
	// maxWait is how long an object may wait for its operator. A client whose watches
	// end again and again waits for up to a minute before it asks anew, and a process
	// that is killed may hold its lock for 15 s more.
	maxWait = 90 * time.Second
)

// writer changes the operator's objects all the time, one after the other, and
// watches how long each waits to be reconciled.
type writer struct {
	*world
	home string // of the operator
	stop func()
	most time.Duration // that an object may wait

	mu      sync.Mutex
	objects []tallyv1.Tally
	looked  time.Time
	waits   *waits
}

func (w *world) startWriter(home string) *writer {
	ctx, cancel := context.WithCancel(context.Background())
	wr := &writer{world: w, home: home, most: maxWait, waits: newWaits(), looked: time.Now()}
	var loops sync.WaitGroup
	loops.Go(func() { every(ctx, writeEvery, wr.change) })
	loops.Go(func() { every(ctx, lookEvery, wr.look) })
	loops.Go(func() { every(ctx, backlogEvery, wr.readBacklog) })
	wr.stop = func() { cancel(); loops.Wait() }
	return wr
}

// every calls f at a steady rate, with the number of the call.
func every(ctx context.Context, d time.Duration, f func(context.Context, int)) {
	tick := time.NewTicker(d)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f(ctx, i)
		}
	}
}

// change changes the next object. While the apiserver is away it does not.
func (w *writer) change(ctx context.Context, n int) {
	w.mu.Lock()
	if len(w.objects) == 0 {
		w.mu.Unlock()
		return
	}
	t := w.objects[n%len(w.objects)].DeepCopy()
	w.mu.Unlock()
	patch := fmt.Appendf(nil, `{"spec":{"say":"%d"}}`, n)
	if err := w.Patch(ctx, t, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waits.wrote(client.ObjectKeyFromObject(t), t.Generation, time.Now())
}

// look reads all objects.
func (w *writer) look(ctx context.Context, _ int) {
	var list tallyv1.TallyList
	err := w.List(ctx, &list, w.ofClass())
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	away := now.Sub(w.looked)
	w.looked = now
	if err != nil {
		w.waits.away(away)
		return
	}
	w.objects = list.Items
	for i := range list.Items {
		t := &list.Items[i]
		w.waits.saw(client.ObjectKeyFromObject(t), t.Status.ObservedGeneration, now)
	}
}

// forget drops what it knows of waits: the objects went back to an earlier state.
func (w *writer) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waits = newWaits()
}

// finish ends the changes, and returns the objects that are not reconciled after
// some patience, and the waits that were too long: those that only the operator's own
// queue made so apart.
func (w *writer) finish(ctx context.Context) (lost []string, long, starved []wait, err error) {
	w.stop()
	n := 0
	_ = w.until(ctx, "the objects to be reconciled", func(ctx context.Context) error {
		w.look(ctx, 0)
		if n++; n%20 == 0 {
			w.readBacklog(ctx, 0)
		}
		var list tallyv1.TallyList
		if err = w.List(ctx, &list, w.ofClass()); err != nil {
			return err
		}
		lost = nil
		for _, t := range list.Items {
			if t.Status.ObservedGeneration < t.Generation {
				lost = append(lost, fmt.Sprintf("%s/%s was not reconciled since generation %d, of %d", t.Namespace, t.Name, t.Status.ObservedGeneration, t.Generation))
			}
		}
		if len(list.Items) < len(w.tenants) {
			err = fmt.Errorf("there are only %d objects", len(list.Items))
			return kube.Never(err)
		}
		if len(lost) > 0 {
			return fmt.Errorf("%d are not", len(lost))
		}
		return nil
	})
	long, starved = w.waits.longer(w.most)
	return lost, long, starved, err
}
