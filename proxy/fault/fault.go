// Package fault decides which faults are injected into the requests of a pod. It is
// pure except for locks: the caller passes the time, and chance follows from the rules'
// seeds.
//
// Rules apply in the order of their policy: injections by name, and the rules of one in
// the order of its spec. All rules that match a request apply. Delays add up. If two
// faults exclude each other, the first one is injected (kind.go).
//
// The n-th request that a rule matches gets the same faults whenever a run is repeated:
// a hash of the rule's seed, its name, the kind and n decides about each kind of fault.
// For the events of a watch the hash includes the number of the event too. Rules without
// a seed use the pod's uid instead. Requests outside of a rule's effective time are not
// counted. A [Store] keeps the counts by the rules' keys, so that they survive policies
// that do not change the rule, and the takeover by another agent.
package fault

import (
	"slices"
	"time"
)

// Faults are the faults to inject into one request. Nil fields do nothing.
type Faults struct {
	// Rules that inject them, as injection/rule, for the access line.
	Rules []string
	Delay time.Duration
	Abort *Abort
	Reset bool // reset the connection before the request is forwarded
	Answer
	// Stale is the age of the list to serve; 0: the current list.
	Stale time.Duration
	Watch *Watch
	// Injected lists the faults by rule and kind, for metrics. Faults of a watch may not
	// have been injected yet (see Over).
	Injected []*Injected

	namespace string // of the request
}

// Injected is one fault of a rule.
type Injected struct {
	Injection, Rule string
	Kind            Kind

	of       *rule
	lifted   bool // not in effect any more
	reported bool // passed to Watch.Report
}

// Missed records that a fault of kind k was not injected, because there was nothing to
// inject it into. It is taken out of Injected and of the rule's count.
func (f *Faults) Missed(k Kind) {
	i := slices.IndexFunc(f.Injected, func(of *Injected) bool { return of.Kind == k && !of.reported })
	if i < 0 {
		return
	}
	of := f.Injected[i].of
	f.Injected = slices.Delete(f.Injected, i, i+1)
	if !slices.ContainsFunc(f.Injected, func(other *Injected) bool { return other.of == of }) {
		of.counts.injected.Add(^uint64(0))
		f.Rules = slices.DeleteFunc(f.Rules, func(name string) bool { return name == of.name })
	}
}

// Done returns the faults that were injected, after the request has ended. stale reports
// whether it was answered with a stale list. f may be nil.
func (f *Faults) Done(stale bool) []*Injected {
	if f == nil {
		return nil
	}
	// There may have been no answer, or not as much of it.
	for k, done := range map[Kind]bool{ResetAfter: f.Broke, Truncate: f.Broke, SlowBody: f.Slowed, StaleList: stale} {
		if !done {
			f.Missed(k)
		}
	}
	f.Over()
	return f.Injected
}

// Over records that a watch has ended. Its faults that were not injected count as
// missed. Those that were injected have been passed to Watch.Report, and are taken out of
// Injected too.
func (f *Faults) Over() {
	for _, of := range slices.Clone(f.Injected) {
		if ofWatches.has(of.Kind) && !of.reported {
			f.Missed(of.Kind)
		}
	}
	f.Injected = slices.DeleteFunc(f.Injected, func(of *Injected) bool { return of.reported })
}

// Abort is an answer of the proxy in place of the server's.
type Abort struct {
	Status int
	Reason string
	// Rule that aborts, as injection/rule.
	Rule string
}

// Watch is the faults to inject into a watch. The functions decide about the next event,
// and are nil if no rule has such a fault. They must be called from one goroutine, and
// once for each event, so that runs are repeatable. The caller injects the faults, and
// reports each of them with Did.
type Watch struct {
	Gone, Cut, Stall *time.Duration // after which they begin; nil: never
	StallLasts       time.Duration  // 0: until the watch ends
	Delay            func() time.Duration
	Duplicate, Drop  func() bool
	MadeUpAfter      time.Duration
	// Exempt reports whether no faults are injected into events of a namespace's objects;
	// nil: no namespace is exempt.
	Exempt func(namespace string) bool
	// Report, if not nil, is called for each injected fault.
	Report func(Injected)

	by     [numKinds]*Injected
	delays []delays
	late   []*Injected // rules that delay the last event passed to Delay
}

// delays decides about the delays of one rule.
type delays struct {
	by   *Injected
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

// Delays returns the number of rules that delay events.
func (w *Watch) Delays() int { return len(w.delays) }

// Did records that a fault was injected into the watch, or into the event that the
// functions decided about last.
func (w *Watch) Did(k Kind) {
	if k == WatchDelay {
		for _, of := range w.late {
			w.report(of)
		}
	} else if of := w.by[k]; of != nil {
		w.report(of)
	}
}

func (w *Watch) report(of *Injected) {
	of.reported = true
	if w.Report != nil {
		w.Report(*of)
	}
}
