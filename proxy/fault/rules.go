package fault

import (
	"fmt"
	"math"
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Rules are those of one policy. They are immutable, and nil has none.
type Rules struct {
	store    *Store
	counts   map[string]*counts // by key
	rules    []*rule
	noFaults map[string]struct{}
	exempt   func(namespace string) bool // nil: none is
}

// rule is a compiled FaultRule.
type rule struct {
	name            string // injection/rule
	injection, rule string
	message         *meshv1.FaultRule // of faults
	can             kinds             // that it has, and not in vain
	expires         int64             // Unix seconds; 0: never
	when            *schedule
	resources       []*match.Resource
	http            []*match.URL
	counts          *counts
	seed            uint64
}

// Compile makes rules that count in s. What s knows of other keys is forgotten
// some time after the rules are put in force by [Rules.Enforce].
func Compile(m *meshv1.Traffic, s *Store) (*Rules, error) {
	out := &Rules{store: s, counts: map[string]*counts{}}
	for _, injection := range m.GetInjections() {
		for _, r := range injection.GetRules() {
			compiled, err := newRule(injection, r)
			if err != nil {
				return nil, fmt.Errorf("rule %q of FaultInjection %q: %w", r.GetName(), injection.GetName(), err)
			}
			compiled.counts, compiled.seed = s.of(r.GetKey()), seedOf(injection.GetName(), r, s.pod)
			out.counts[r.GetKey()] = compiled.counts
			out.rules = append(out.rules, compiled)
		}
	}
	if len(m.GetNoFaults()) > 0 {
		out.noFaults = map[string]struct{}{}
		for _, namespace := range m.GetNoFaults() {
			out.noFaults[namespace] = struct{}{}
		}
		out.exempt = func(namespace string) bool { _, is := out.noFaults[namespace]; return is }
	}
	return out, nil
}

func newRule(injection *meshv1.Injection, m *meshv1.FaultRule) (*rule, error) {
	out := &rule{
		name: injection.GetName() + "/" + m.GetName(), injection: injection.GetName(), rule: m.GetName(),
		message: m, expires: injection.GetExpires(),
	}
	var err error
	if out.can, err = kindsOf(m); err != nil {
		return nil, err
	}
	if out.when, err = newSchedule(m.GetEffectiveTime()); err != nil {
		return nil, err
	}
	for _, r := range m.GetResources() {
		compiled, err := match.NewResource(r)
		if err != nil {
			return nil, err
		}
		out.resources = append(out.resources, compiled)
	}
	for _, r := range m.GetHttp() {
		compiled, err := match.NewURL(r)
		if err != nil {
			return nil, err
		}
		out.http = append(out.http, compiled)
	}
	return out, nil
}

// kindsOf returns the kinds of fault that a rule may do, and checks what it says of
// them: it came from outside.
func kindsOf(m *meshv1.FaultRule) (can kinds, err error) {
	add := func(k Kind, percent float64) {
		if !isPercent(percent) && err == nil {
			err = fmt.Errorf("%s: %v is no percentage", k, percent)
		}
		if percent > 0 {
			can |= setOf(k)
		}
	}
	lasts := func(k Kind, lengths ...int64) {
		for _, ns := range lengths {
			if ns < 0 && err == nil {
				err = fmt.Errorf("%s: a negative length of time", k)
			}
		}
	}
	amount := func(k Kind, n, low uint64) {
		if (n < low || n > math.MaxInt64) && err == nil {
			err = fmt.Errorf("%s: %d bytes are not possible", k, n)
		}
	}
	if f := m.GetDelay(); f != nil {
		add(Delay, f.GetPercent())
		lasts(Delay, f.GetFixedNs())
	}
	if f := m.GetAbort(); f != nil {
		add(Aborted, f.GetPercent())
		if s := f.GetStatus(); (s < 200 || s > 599) && err == nil {
			err = fmt.Errorf("%s: %d is no status of 200 to 599", Aborted, s)
		}
	}
	if f := m.GetReset_(); f != nil {
		k := Reset
		if f.GetAfterAnswer() {
			k = ResetAfter
		}
		add(k, f.GetPercent())
	}
	if f := m.GetTruncate(); f != nil {
		add(Truncate, f.GetPercent())
		amount(Truncate, f.GetAfterBytes(), 0)
	}
	if f := m.GetSlowBody(); f != nil {
		add(SlowBody, f.GetPercent())
		amount(SlowBody, f.GetBytesPerSecond(), 1)
	}
	if f := m.GetStaleList(); f != nil {
		add(StaleList, f.GetPercent())
		lasts(StaleList, f.GetAgeNs())
	}
	w := m.GetWatch()
	if f := w.GetGone(); f != nil {
		add(WatchGone, f.GetPercent())
		lasts(WatchGone, f.GetAfterNs())
	}
	if f := w.GetCut(); f != nil {
		add(WatchCut, f.GetPercent())
		lasts(WatchCut, f.GetAfterNs())
	}
	if f := w.GetStall(); f != nil {
		add(WatchStall, f.GetPercent())
		lasts(WatchStall, f.GetAfterNs(), f.GetLastsNs())
	}
	if f := w.GetDelay(); f != nil {
		add(WatchDelay, f.GetPercent())
		lasts(WatchDelay, f.GetByNs())
	}
	if f := w.GetDuplicate(); f != nil {
		add(WatchDuplicate, f.GetPercent())
	}
	if f := w.GetDrop(); f != nil {
		add(WatchDrop, f.GetPercent())
		lasts(WatchDrop, f.GetMadeUpAfterNs())
	}
	return can, err
}

// Enforce makes these the rules that the store tells of. Others are forgotten later.
func (r *Rules) Enforce(now time.Time) {
	if r == nil || r.store == nil {
		return
	}
	r.store.enforce(now, r.counts)
}

// Name is a rule's, with that of its injection.
type Name struct{ Injection, Rule string }

// Names are those of the rules, for the series of metrics.
func (r *Rules) Names() map[Name]bool {
	out := map[Name]bool{}
	if r != nil {
		for _, of := range r.rules {
			out[Name{of.injection, of.rule}] = true
		}
	}
	return out
}

// Resources are the rules that may be about requests of one kind. Nil: none is.
type Resources struct {
	rules   *Rules
	entries []entry
}

// entry is a rule, and which of its matches may be about the kind.
type entry struct {
	*rule
	may     kinds
	matches []*match.Resource
}

// OfKind is for a plan to keep.
func (r *Rules) OfKind(k match.Kind) *Resources {
	if r == nil {
		return nil
	}
	out := &Resources{rules: r}
	for _, of := range r.rules {
		e := entry{rule: of, may: of.can & possible(k.Verb)}
		if e.may == 0 || len(of.resources) == 0 && len(of.http) > 0 {
			continue
		}
		for _, m := range of.resources {
			if m.Of(k) {
				e.matches = append(e.matches, m)
			}
		}
		if len(of.resources) == 0 || e.matches != nil {
			out.entries = append(out.entries, e)
		}
	}
	if out.entries == nil {
		return nil
	}
	return out
}

// possible are the kinds of fault that requests with a verb can meet.
func possible(verb string) kinds {
	all := setOf(Delay, Aborted, Reset, ResetAfter, Truncate, SlowBody)
	switch verb {
	case "list":
		return all | setOf(StaleList)
	case "watch":
		return all | ofWatches
	}
	return all
}

// Oldest is how old a list can be asked to be; 0: none of the rules asks.
func (r *Resources) Oldest() (age time.Duration) {
	if r != nil {
		for _, e := range r.entries {
			if e.may.has(StaleList) {
				age = max(age, time.Duration(e.message.GetStaleList().GetAgeNs()))
			}
		}
	}
	return age
}

// MayBeStale tells whether a rule that is in force now may make a list stale.
func (r *Resources) MayBeStale(now time.Time, o *match.Object) bool {
	if r == nil {
		return false
	}
	if _, exempt := r.rules.noFaults[o.Namespace]; exempt {
		return false
	}
	return slices.ContainsFunc(r.entries, func(e entry) bool {
		most := e.message.GetCount()
		return e.may.has(StaleList) && e.inForce(now) && (most == 0 || e.counts.injected.Load() < most) && e.match(o)
	})
}

func (r *rule) inForce(now time.Time) bool {
	return (r.expires == 0 || now.Unix() < r.expires) && r.when.has(now)
}

// Decide tells what is done to a request for a resource; nil for nothing.
func (r *Resources) Decide(now time.Time, o *match.Object) *Faults {
	if r == nil {
		return nil
	}
	if _, exempt := r.rules.noFaults[o.Namespace]; exempt {
		return nil
	}
	d := decision{now: now, rules: r.rules, namespace: o.Namespace}
	for i := range r.entries {
		if e := &r.entries[i]; e.match(o) {
			d.add(e.rule, e.may)
		}
	}
	return d.faults
}

func (e *entry) match(o *match.Object) bool {
	if len(e.resources) == 0 {
		return !o.Lock // it does not name the lock
	}
	for _, m := range e.matches {
		if m.Match(o) {
			return true
		}
	}
	return false
}

// DecideOther tells what is done to a request to the apiserver for no resource, which
// only rules without a match are about.
func (r *Rules) DecideOther(now time.Time) *Faults {
	if r == nil {
		return nil
	}
	d := decision{now: now, rules: r}
	for _, of := range r.rules {
		if len(of.resources) == 0 && len(of.http) == 0 {
			d.add(of, of.can&possible(""))
		}
	}
	return d.faults
}

// DecideHTTP tells what is done to a request to another host, or a connection if no
// more is seen: rules that would have to see more are left out.
func (r *Rules) DecideHTTP(now time.Time, req *match.HTTP) *Faults {
	if r == nil {
		return nil
	}
	d := decision{now: now, rules: r}
	for _, of := range r.rules {
		if slices.ContainsFunc(of.http, func(u *match.URL) bool { return u.Match(req) == match.Yes }) {
			d.add(of, of.can&possible(""))
		}
	}
	return d.faults
}

// Deep tells whether a rule must see requests to a host within TLS.
func (r *Rules) Deep(host string) bool {
	return r != nil && slices.ContainsFunc(r.rules, func(of *rule) bool {
		return slices.ContainsFunc(of.http, func(u *match.URL) bool { return u.Deep() && u.HostIs(host) })
	})
}
