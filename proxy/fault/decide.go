package fault

import (
	"math"
	"time"
)

// decision collects the faults of one request, rule by rule.
type decision struct {
	now       time.Time
	rules     *Rules
	namespace string
	taken     kinds
	faults    *Faults
}

// add adds the faults of a rule that matches the request. may are the rule's kinds of
// fault that apply to such a request.
func (d *decision) add(r *rule, may kinds) {
	if may == 0 || !r.inForce(d.now) {
		return
	}
	n := r.counts.matched.Add(1) - 1
	now := r.decide(may, n).beside(d.taken)
	if now == 0 || !r.counts.take(r.message.GetCount()) {
		return
	}
	d.taken |= now
	if d.faults == nil {
		d.faults = &Faults{Answer: Answer{Truncate: -1}, namespace: d.namespace}
	}
	d.faults.Rules = append(d.faults.Rules, r.name)
	for k := range numKinds {
		if now.has(k) {
			d.do(r, k, n)
		}
	}
}

// decide returns the kinds of fault to inject into the n-th request.
func (r *rule) decide(may kinds, n uint64) (out kinds) {
	for k := range numKinds {
		if may.has(k) && (ofEvents.has(k) || chance(r.percent[k], r.seed, k, n)) {
			out |= setOf(k)
		}
	}
	return out
}

// do adds one fault of the n-th request that the rule matched.
func (d *decision) do(r *rule, k Kind, n uint64) {
	f, m := d.faults, r.message
	injected := &Injected{Injection: r.injection, Rule: r.rule, Kind: k, of: r}
	if ofWatches.has(k) {
		d.watch(r, k, n, injected)
	}
	f.Injected = append(f.Injected, injected)
	switch k {
	case Delay:
		f.Delay = sum(f.Delay, m.GetDelay().GetFixedNs())
	case Aborted:
		f.Abort = &Abort{Status: int(m.GetAbort().GetStatus()), Reason: m.GetAbort().GetReason(), Rule: r.name}
	case Reset:
		f.Reset = true
	case ResetAfter:
		f.ResetAfter = true
	case Truncate:
		f.Truncate = int64(m.GetTruncate().GetAfterBytes())
	case SlowBody:
		f.Slow = int64(m.GetSlowBody().GetBytesPerSecond())
	case StaleList:
		f.Stale = time.Duration(m.GetStaleList().GetAgeNs())
	}
}

// watch adds one fault of the n-th watch that the rule matched.
func (d *decision) watch(r *rule, k Kind, n uint64, injected *Injected) {
	if d.faults.Watch == nil {
		d.faults.Watch = &Watch{Exempt: d.rules.exempt}
	}
	f, m := d.faults.Watch, r.message.GetWatch()
	f.by[k] = injected
	switch k {
	case WatchGone:
		f.Gone = new(time.Duration(m.GetGone().GetAfterNs()))
	case WatchCut:
		f.Cut = new(time.Duration(m.GetCut().GetAfterNs()))
	case WatchStall:
		f.Stall = new(time.Duration(m.GetStall().GetAfterNs()))
		f.StallLasts = time.Duration(m.GetStall().GetLastsNs())
	case WatchDelay:
		f.delays = append(f.delays, delays{injected, r.events(k, n)})
		f.Delay = f.delay
	case WatchDuplicate:
		f.Duplicate = r.events(k, n)
	case WatchDrop:
		f.Drop, f.MadeUpAfter = r.events(k, n), time.Duration(m.GetDrop().GetMadeUpAfterNs())
	}
}

// events returns a function that decides about each event of the n-th watch that the
// rule matched.
func (r *rule) events(k Kind, n uint64) func() bool {
	event := uint64(0)
	return func() bool {
		inject := chance(r.percent[k], r.seed, k, n, event)
		event++
		return inject
	}
}

// sum returns the sum of two delays, at most the maximum duration.
func sum(d time.Duration, ns int64) time.Duration {
	return d + time.Duration(min(ns, math.MaxInt64-int64(d)))
}
