// Package fault decides which requests of a pod are harmed and how. It is pure but
// for locks: the time is told to it, and chance follows from the rules' seeds.
//
// Rules are asked in the order of their policy: injections by name, and rules as they
// were written. All that match a request apply: delays add up, and of what cannot be
// done together the first is done (kind.go).
//
// The n-th request that a rule matches meets the same faults whenever a run is
// repeated: each kind of fault is decided about by a hash of the rule's seed, its name,
// the kind and n, and events of a watch by that of their own number too. Rules without a
// seed have the pod's uid in its place. What is outside of a
// rule's time is not counted. What was counted is kept in a [Store] by the rules' keys,
// so that it outlives policies that do not touch a rule, and the agent.
package fault

import (
	"slices"
	"time"
)

// Faults are what is done to one request. Nil fields do nothing.
type Faults struct {
	// Rules that do it, as injection/rule, for the access line.
	Rules []string
	Delay time.Duration
	Abort *Abort
	// Reset is before the request is sent on, or after it was answered.
	Reset, ResetAfter bool
	// Truncate breaks the answer off after so many bytes; below 0: does not.
	Truncate int64
	// Slow is bytes a second of the answer; 0: as they come.
	Slow int64
	// Broke is set by whoever breaks the answer off, and Slowed by whoever holds bytes of it
	// back.
	Broke, Slowed bool
	// Stale is how old the list is to be; 0: as it is.
	Stale time.Duration
	Watch *Watch
	// Injected is the same by rule and kind, for metrics. What is of a watch may not have
	// happened yet (Over).
	Injected []Injected

	// parts are all that was decided, but for what was lifted.
	parts     []Injected
	namespace string // of the request
}

// Injected is one fault of a rule.
type Injected struct {
	Injection, Rule string
	Kind            Kind

	of   *rule
	done *bool // of a watch only: it was told to Watch.Told
}

// Missed says that a fault was not injected after all, for nothing was there to
// inject it into.
func (f *Faults) Missed(k Kind) {
	for i, of := range f.Injected {
		if of.Kind != k || of.done != nil && *of.done {
			continue
		}
		f.Injected = slices.Delete(f.Injected, i, i+1)
		if !slices.ContainsFunc(f.Injected, func(other Injected) bool { return other.of == of.of }) {
			of.of.counts.injected.Add(^uint64(0))
			f.Rules = slices.DeleteFunc(f.Rules, func(name string) bool { return name == of.Injection+"/"+of.Rule })
		}
		return
	}
}

// Over says that nothing more is done to a watch: what was to be done and was not, is
// missed. What was done has been told, and is not in Injected any more.
func (f *Faults) Over() {
	for k := range numKinds {
		for ofWatches.has(k) && slices.ContainsFunc(f.Injected, func(of Injected) bool { return of.Kind == k && !*of.done }) {
			f.Missed(k)
		}
	}
	f.Injected = slices.DeleteFunc(f.Injected, func(of Injected) bool { return of.done != nil })
}

// Abort is an answer.
type Abort struct {
	Status int
	Reason string
	// Rule that says so, as injection/rule.
	Rule string
}

// Watch is what is done to a watch. Chance decides about each event, by functions
// that are nil where there is nothing to decide. They are for one goroutine, and each is
// to be asked about each event once, so that a run repeats. Whoever does what was
// decided says so (Did).
type Watch struct {
	Gone, Cut, Stall bool
	GoneAfter        time.Duration
	CutAfter         time.Duration
	StallAfter       time.Duration
	StallLasts       time.Duration // 0: until the watch ends
	Delay            func() time.Duration
	Duplicate, Drop  func() bool
	MadeUpAfter      time.Duration
	// Exempt reports whether events of a namespace's objects are left alone; nil: none are.
	Exempt func(namespace string) bool
	// Told, if not nil, hears of each fault that was done.
	Told func(Injected)

	by     [numKinds]*Injected
	delays []delays
	late   []Injected // that Delay decided on last
}

// delays are those of one rule.
type delays struct {
	by   Injected
	late func() bool
}

func (w *Watch) delay() (by time.Duration) {
	w.late = w.late[:0]
	for _, d := range w.delays {
		if d.late() {
			by = sum(by, d.by.of.message.GetWatch().GetDelay().GetByNs())
			w.late = append(w.late, d.by)
		}
	}
	return by
}

// Delays is how many rules delay events.
func (w *Watch) Delays() int { return len(w.delays) }

// Did says that a fault was done to the watch, or to the event that was decided about
// last.
func (w *Watch) Did(k Kind) {
	if k == WatchDelay {
		for _, of := range w.late {
			w.tell(of)
		}
	} else if of := w.by[k]; of != nil {
		w.tell(*of)
	}
}

func (w *Watch) tell(of Injected) {
	*of.done = true
	if w.Told != nil {
		w.Told(of)
	}
}
