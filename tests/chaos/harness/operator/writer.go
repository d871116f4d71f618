package operator

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
	readEvery  = 500 * time.Millisecond
	// defaultMaxWait is how long an object may wait for its operator. A client whose watches
	// end again and again waits for up to a minute before it tries again, and a process that
	// is killed may keep its lock for 15 s more. The time in which no manager leads does not
	// count: without one no pod takes the keys of another, and the kubelet restarts a manager
	// that is killed again and again ever later.
	defaultMaxWait = 90 * time.Second
)

// Writer changes the operator's objects all the time, one after the other, and measures
// how long each waits to be reconciled.
type Writer struct {
	*Tenants
	Stop    func()        // ends the changes
	MaxWait time.Duration // of an object

	home string // the operator's namespace

	mu       sync.Mutex
	objects  []tallyv1.Tally
	lastRead time.Time
	waits    *waits
}

// StartWriter starts the operator's writer.
func (o *Operator) StartWriter() {
	ctx, cancel := context.WithCancel(context.Background())
	w := &Writer{Tenants: o.Tenants, home: o.Home, MaxWait: defaultMaxWait, waits: newWaits(), lastRead: time.Now()}
	var loops sync.WaitGroup
	loops.Go(func() { kube.Every(ctx, writeEvery, w.change) })
	loops.Go(func() { kube.Every(ctx, readEvery, w.read) })
	loops.Go(func() { kube.Every(ctx, backlogEvery, w.readBacklog) })
	w.Stop = func() { cancel(); loops.Wait() }
	o.Writer = w
}

// change changes the next object. It does nothing while the apiserver is unavailable.
func (w *Writer) change(ctx context.Context, n int) {
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

// read reads all objects.
func (w *Writer) read(ctx context.Context, _ int) {
	var list tallyv1.TallyList
	err := w.List(ctx, &list, w.labels())
	leads, leadsErr := w.ManagerLeads(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	since := now.Sub(w.lastRead)
	w.lastRead = now
	if err != nil || leadsErr != nil || !leads {
		w.waits.exclude(since)
	}
	if err != nil {
		return
	}
	w.objects = list.Items
	for i := range list.Items {
		t := &list.Items[i]
		w.waits.reconciled(client.ObjectKeyFromObject(t), t.Status.ObservedGeneration, now)
	}
}

// Reset drops all waits: the objects went back to an earlier state.
func (w *Writer) Reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waits = newWaits()
}

// Finish ends the changes. It returns the objects that are not reconciled after Timeout, the
// waits that were too long, and, apart from those, the waits that were too long only because
// of the operator's own queue.
func (w *Writer) Finish(ctx context.Context) (lost []string, long, starved []wait, err error) {
	w.Stop()
	n := 0
	_ = w.Until(ctx, "the objects to be reconciled", func(ctx context.Context) error {
		w.read(ctx, 0)
		if n++; n%20 == 0 {
			w.readBacklog(ctx, 0)
		}
		var list tallyv1.TallyList
		if err = w.List(ctx, &list, w.labels()); err != nil {
			return err
		}
		lost = nil
		for _, t := range list.Items {
			if t.Status.ObservedGeneration < t.Generation {
				lost = append(lost, fmt.Sprintf("%s/%s was not reconciled since generation %d, of %d", t.Namespace, t.Name, t.Status.ObservedGeneration, t.Generation))
			}
		}
		if len(list.Items) < len(w.Names) {
			err = fmt.Errorf("there are only %d objects", len(list.Items))
			return kube.Never(err)
		}
		if len(lost) > 0 {
			return fmt.Errorf("%d are not", len(lost))
		}
		return nil
	})
	long, starved = w.waits.longerThan(w.MaxWait)
	return lost, long, starved, err
}
