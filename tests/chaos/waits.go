package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// waits are how long objects have waited for somebody to reconcile what they became.
type waits struct {
	open    map[types.NamespacedName]wait
	longest map[string]wait // by namespace
}

// wait is for a generation, since it was written.
type wait struct {
	object     types.NamespacedName
	generation int64
	since      time.Time
	took       time.Duration
	inQueue    time.Duration // for how long of that it was in the queue of an operator's pod
	pod        string        // that pod
}

func newWaits() *waits {
	return &waits{open: map[types.NamespacedName]wait{}, longest: map[string]wait{}}
}

// wrote notes that an object has a new generation. Who reconciles it has also
// reconciled those before, so one that waits already goes on waiting for its own.
func (w *waits) wrote(object types.NamespacedName, generation int64, at time.Time) {
	if _, waits := w.open[object]; !waits {
		w.open[object] = wait{object: object, generation: generation, since: at}
	}
}

// saw notes up to which generation an object was reconciled at a time.
func (w *waits) saw(object types.NamespacedName, reconciled int64, at time.Time) {
	open, ok := w.open[object]
	if !ok {
		return
	}
	open.took = at.Sub(open.since)
	if open.took > w.longest[object.Namespace].took {
		w.longest[object.Namespace] = open
	}
	if reconciled >= open.generation {
		delete(w.open, object)
	}
}

// waiting reports whether an object has waited for longer than a time.
func (w *waits) waiting(than time.Duration, now time.Time) bool {
	for _, open := range w.open {
		if now.Sub(open.since) > than {
			return true
		}
	}
	return false
}

// queued notes for how long an object, as namespace/name, has been in the queue of a pod.
func (w *waits) queued(object, pod string, long time.Duration) {
	for key, open := range w.open {
		if key.String() == object && long > open.inQueue {
			open.inQueue, open.pod = long, pod
			w.open[key] = open
		}
	}
}

// away notes that for a time nobody could have reconciled anything.
func (w *waits) away(d time.Duration) {
	for object, open := range w.open {
		open.since = open.since.Add(d)
		w.open[object] = open
	}
}

// longer are the namespaces with an object that has waited for longer than a time.
// Starved are those of them that would not have, but for an operator's own queue.
func (w *waits) longer(than time.Duration) (out, starved []wait) {
	for _, l := range w.longest {
		switch {
		case l.took <= than:
		case l.took-l.inQueue <= than && l.inQueue > 0:
			starved = append(starved, l)
		default:
			out = append(out, l)
		}
	}
	byObject := func(a, b wait) int { return strings.Compare(a.object.String(), b.object.String()) }
	slices.SortFunc(out, byObject)
	slices.SortFunc(starved, byObject)
	return out, starved
}

func (w wait) String() string {
	text := fmt.Sprintf("%s waited %v for a reconcile, from %s on", w.object, w.took.Round(time.Millisecond), w.since.UTC().Format("15:04:05.000"))
	if w.inQueue > 0 {
		text += fmt.Sprintf(", and was in the queue of %s for %v of that", w.pod, w.inQueue)
	}
	return text
}
