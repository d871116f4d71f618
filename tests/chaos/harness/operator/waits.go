package operator

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// waits measures how long objects wait until their latest change is reconciled.
type waits struct {
	open    map[types.NamespacedName]wait
	longest map[string]wait // by namespace
}

// wait is that of one generation of an object.
type wait struct {
	object     types.NamespacedName
	generation int64
	since      time.Time
	took       time.Duration
	inQueue    time.Duration // how much of it in the queue of an operator's pod
	pod        string        // that pod
}

func newWaits() *waits {
	return &waits{open: map[types.NamespacedName]wait{}, longest: map[string]wait{}}
}

// wrote records a new generation of an object. An object that already waits keeps its earlier
// generation: reconciling the later one includes the earlier.
func (w *waits) wrote(object types.NamespacedName, generation int64, at time.Time) {
	if _, waits := w.open[object]; !waits {
		w.open[object] = wait{object: object, generation: generation, since: at}
	}
}

// reconciled records which generation of an object is reconciled at a time.
func (w *waits) reconciled(object types.NamespacedName, generation int64, at time.Time) {
	open, ok := w.open[object]
	if !ok {
		return
	}
	open.took = at.Sub(open.since)
	if open.took > w.longest[object.Namespace].took {
		w.longest[object.Namespace] = open
	}
	if generation >= open.generation {
		delete(w.open, object)
	}
}

// anyLongerThan reports whether an object has waited for longer than d.
func (w *waits) anyLongerThan(d time.Duration, now time.Time) bool {
	for _, open := range w.open {
		if now.Sub(open.since) > d {
			return true
		}
	}
	return false
}

// queued records for how long an object (namespace/name) has been in the queue of a pod.
func (w *waits) queued(object, pod string, d time.Duration) {
	for key, open := range w.open {
		if key.String() == object && d > open.inQueue {
			open.inQueue, open.pod = d, pod
			w.open[key] = open
		}
	}
}

// exclude subtracts a time in which nothing could be reconciled from all waits.
func (w *waits) exclude(d time.Duration) {
	for object, open := range w.open {
		open.since = open.since.Add(d)
		w.open[object] = open
	}
}

// longerThan returns the longest wait of each namespace in which one exceeds d. The starved
// waits exceed it only because of the operator's own queue.
func (w *waits) longerThan(d time.Duration) (long, starved []wait) {
	for _, l := range w.longest {
		switch {
		case l.took <= d:
		case l.took-l.inQueue <= d && l.inQueue > 0:
			starved = append(starved, l)
		default:
			long = append(long, l)
		}
	}
	byObject := func(a, b wait) int { return strings.Compare(a.object.String(), b.object.String()) }
	slices.SortFunc(long, byObject)
	slices.SortFunc(starved, byObject)
	return long, starved
}

func (w wait) String() string {
	text := fmt.Sprintf("%s waited %v for a reconcile, from %s on", w.object, w.took.Round(time.Millisecond), w.since.UTC().Format("15:04:05.000"))
	if w.inQueue > 0 {
		text += fmt.Sprintf(", and was in the queue of %s for %v of that", w.pod, w.inQueue)
	}
	return text
}
