package fault

import (
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Lift removes from f the faults that are not in effect any more: those of rules that r
// does not contain, those of rules outside of their effective time, and all if the
// namespace is exempt. Faults that were injected stay counted. f may be nil.
func (r *Rules) Lift(now time.Time, f *Faults) {
	if f == nil {
		return
	}
	lifted := false
	for _, part := range f.Injected {
		if !part.lifted && !r.inEffect(now, part, f.namespace) {
			part.lifted, lifted = true, true
		}
	}
	if lifted {
		f.leave()
	}
	if f.Watch != nil && r != nil {
		f.Watch.Exempt = r.exempt
	}
}

func (r *Rules) inEffect(now time.Time, part *Injected, namespace string) bool {
	return r != nil && (r.exempt == nil || !r.exempt(namespace)) && slices.ContainsFunc(r.rules, func(of *rule) bool {
		return of.counts == part.of.counts && of.name == part.of.name && of.inForce(now)
	})
}

// leave removes the faults that were lifted.
func (f *Faults) leave() {
	var left kinds
	var delay time.Duration
	for _, part := range f.Injected {
		if part.lifted {
			continue
		}
		if left |= setOf(part.Kind); part.Kind == Delay {
			delay = sum(delay, part.of.message.GetDelay().GetFixedNs())
		}
	}
	f.Delay = min(f.Delay, delay)
	if !left.has(Aborted) {
		f.Abort = nil
		f.Missed(Aborted)
	}
	if !left.has(Reset) {
		f.Reset = false
		f.Missed(Reset)
	}
	if f.ResetAfter = f.ResetAfter && left.has(ResetAfter); !left.has(Truncate) {
		f.Truncate = -1
	}
	if !left.has(SlowBody) {
		f.Slow = 0
	}
	if !left.has(StaleList) {
		f.Stale = 0
	}
	if left&ofWatches == 0 {
		f.Watch = nil
	}
	if f.Watch != nil {
		f.Watch.leave(left)
	}
}

func (w *Watch) leave(left kinds) {
	for k, after := range map[Kind]**time.Duration{WatchGone: &w.Gone, WatchCut: &w.Cut, WatchStall: &w.Stall} {
		if !left.has(k) {
			*after = nil
		}
	}
	if !left.has(WatchDuplicate) {
		w.Duplicate = nil
	}
	if !left.has(WatchDrop) {
		w.Drop = nil
	}
	w.delays = slices.DeleteFunc(w.delays, func(d delays) bool { return d.by.lifted })
	if !left.has(WatchDelay) {
		w.Delay = nil
	}
}

// Drops reports whether a rule may drop events from watches of a kind, whether or not it
// is in effect now.
func (r *Rules) Drops(k match.Kind) bool {
	of := r.OfKind(k)
	for rule := range of.all() {
		if (rule.can & of.may).has(WatchDrop) {
			return true
		}
	}
	return false
}
