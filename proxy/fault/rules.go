package fault

import (
	"fmt"
	"iter"
	"math"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Rules are the fault rules of one policy. They are immutable. Nil has no rules.
type Rules struct {
	store    *Store
	counts   map[string]*counts // by key
	rules    []*rule
	noFaults sets.Set[string]
	exempt   func(namespace string) bool // nil: no namespace is

	entries match.Entries[*rule] // of the rules that can inject a fault, in their order
}

// rule is a compiled FaultRule.
type rule struct {
	name            string // injection/rule
	injection, rule string
	message         *meshv1.FaultRule
	can             kinds // kinds of fault with a percentage above 0
	percent         [numKinds]float64
	expires         int64 // Unix seconds; 0: never
	when            *schedule
	counts          *counts
	seed            uint64
}

// Compile returns the rules of m, which count in s. Some time after [Rules.Enforce], s
// forgets the counts of other keys.
func Compile(m *meshv1.Traffic, s *Store, now time.Time) (*Rules, error) {
	out := &Rules{store: s, counts: map[string]*counts{}}
	for _, injection := range m.GetInjections() {
		for _, r := range injection.GetRules() {
			compiled, err := newRule(injection, r)
			if err == nil {
				err = out.add(compiled)
			}
			if err == nil {
				compiled.counts, err = s.Add(out.counts, r.GetKey(), &counts{}, now)
			}
			if err != nil {
				return nil, fmt.Errorf("rule %q of FaultInjection %q: %w", r.GetName(), injection.GetName(), err)
			}
			compiled.seed = seedOf(injection.GetName(), r, s.pod)
			out.rules = append(out.rules, compiled)
		}
	}
	out.entries.Index()
	if len(m.GetNoFaults()) > 0 {
		out.noFaults = sets.New(m.GetNoFaults()...)
		out.exempt = out.noFaults.Has
	}
	return out, nil
}

// add adds the entries of a rule. If the rule can inject nothing, its entries are only
// validated.
func (r *Rules) add(of *rule) error {
	to, m := &r.entries, of.message
	if of.can == 0 {
		to = &match.Entries[*rule]{}
	}
	resources, paths := m.GetResources(), m.GetPaths()
	if len(resources)+len(paths)+len(m.GetHttp()) == 0 { // all requests to the apiserver, except those for operator locks
		resources, paths = []*meshv1.ResourceMatch{{}}, []*meshv1.PathMatch{{}}
	}
	return to.Add(of, resources, paths, m.GetHttp())
}

func newRule(injection *meshv1.Injection, m *meshv1.FaultRule) (*rule, error) {
	out := &rule{
		name: injection.GetName() + "/" + m.GetName(), injection: injection.GetName(), rule: m.GetName(),
		message: m, expires: injection.GetExpires(),
	}
	c := checked{rule: out} // the rule comes from outside the process
	c.request(m)
	c.watch(m.GetWatch())
	if c.err != nil {
		return nil, c.err
	}
	var err error
	out.when, err = newSchedule(m.GetEffectiveTime())
	return out, err
}

// checked validates the faults of a rule. It collects their percentages and the first
// error.
type checked struct {
	*rule
	err error
}

func (c *checked) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

// add adds a kind of fault. It validates its percentage and its durations in nanoseconds.
func (c *checked) add(k Kind, percent float64, lengths ...int64) {
	if !isPercent(percent) {
		c.fail("%s: invalid percentage %v", k, percent)
	}
	if c.percent[k] = percent; percent > 0 {
		c.can |= setOf(k)
	}
	for _, ns := range lengths {
		if ns < 0 {
			c.fail("%s: negative duration", k)
		}
	}
}

// amount checks a number of bytes.
func (c *checked) amount(k Kind, n, low uint64) {
	if n < low || n > math.MaxInt64 {
		c.fail("%s: invalid number of bytes %d", k, n)
	}
}

func (c *checked) request(m *meshv1.FaultRule) {
	c.add(Delay, m.GetDelay().GetPercent(), m.GetDelay().GetFixedNs())
	c.add(Aborted, m.GetAbort().GetPercent())
	if s := m.GetAbort().GetStatus(); m.GetAbort() != nil && (s < 200 || s > 599) {
		c.fail("%s: status %d is not between 200 and 599", Aborted, s)
	}
	reset := Reset
	if m.GetReset_().GetAfterAnswer() {
		reset = ResetAfter
	}
	c.add(reset, m.GetReset_().GetPercent())
	c.add(Truncate, m.GetTruncate().GetPercent())
	c.amount(Truncate, m.GetTruncate().GetAfterBytes(), 0)
	if f := m.GetSlowBody(); f != nil {
		c.add(SlowBody, f.GetPercent())
		c.amount(SlowBody, f.GetBytesPerSecond(), 1)
	}
	c.add(StaleList, m.GetStaleList().GetPercent(), m.GetStaleList().GetAgeNs())
}

func (c *checked) watch(w *meshv1.WatchFault) {
	c.add(WatchGone, w.GetGone().GetPercent(), w.GetGone().GetAfterNs())
	c.add(WatchCut, w.GetCut().GetPercent(), w.GetCut().GetAfterNs())
	c.add(WatchStall, w.GetStall().GetPercent(), w.GetStall().GetAfterNs(), w.GetStall().GetLastsNs())
	c.add(WatchDelay, w.GetDelay().GetPercent(), w.GetDelay().GetByNs())
	c.add(WatchDuplicate, w.GetDuplicate().GetPercent())
	c.add(WatchDrop, w.GetDrop().GetPercent(), w.GetDrop().GetMadeUpAfterNs())
}

// Enforce makes these the rules in force. The store forgets the counts of other rules
// later.
func (r *Rules) Enforce(now time.Time) {
	if r == nil {
		return
	}
	r.store.Enforce(now, r.counts)
}

// Name is the name of a rule and of its FaultInjection.
type Name struct{ Injection, Rule string }

// Names returns the names of the rules, for the series of metrics.
func (r *Rules) Names() map[Name]bool {
	out := map[Name]bool{}
	if r != nil {
		for _, of := range r.rules {
			out[Name{of.injection, of.rule}] = true
		}
	}
	return out
}

// Resources are the rules that may match requests of one kind. Nil has no rules.
type Resources struct {
	rules *Rules
	may   kinds // kinds of fault that apply to such requests
	index *match.Index
}

// OfKind returns the rules that may match requests of a kind, nil if there are none.
// Plans keep the result.
func (r *Rules) OfKind(k match.Kind) *Resources {
	if r == nil {
		return nil
	}
	index, may := r.entries.Table.OfKind(k), possible(k.Verb)
	if index == nil || !slices.ContainsFunc(index.All(), func(n int32) bool { return r.entries.Resources[n].Rule.can&may != 0 }) {
		return nil
	}
	return &Resources{r, may, index}
}

// all yields the rules that may match such requests.
func (r *Resources) all() iter.Seq[*rule] {
	return func(yield func(*rule) bool) {
		if r == nil {
			return
		}
		for _, n := range r.index.All() {
			if !yield(r.rules.entries.Resources[n].Rule) {
				return
			}
		}
	}
}

// possible returns the kinds of fault that apply to requests with a verb.
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

// Oldest returns the maximum age of a stale list; 0 if no rule makes lists stale.
func (r *Resources) Oldest() (age time.Duration) {
	for of := range r.all() {
		if (of.can & r.may).has(StaleList) {
			age = max(age, time.Duration(of.message.GetStaleList().GetAgeNs()))
		}
	}
	return age
}

// MayBeStale reports whether a rule that is in force now may make a list stale.
func (r *Resources) MayBeStale(now time.Time, o *match.Object) bool {
	for of := range r.about(o) {
		most := of.message.GetCount()
		if (of.can & r.may).has(StaleList) && of.inForce(now) && (most == 0 || of.counts.injected.Load() < most) {
			return true
		}
	}
	return false
}

func (r *rule) inForce(now time.Time) bool {
	return (r.expires == 0 || now.Unix() < r.expires) && r.when.has(now)
}

// Decide returns the faults to inject into a request for a resource, nil if there are
// none.
func (r *Resources) Decide(now time.Time, o *match.Object) *Faults {
	if r == nil {
		return nil
	}
	d := decision{now: now, rules: r.rules, namespace: o.Namespace}
	for of := range r.about(o) {
		d.add(of, of.can&r.may)
	}
	return d.faults
}

// about yields the rules that match a request, in their order.
func (r *Resources) about(o *match.Object) iter.Seq[*rule] {
	return func(yield func(*rule) bool) {
		if r == nil || r.rules.noFaults.Has(o.Namespace) {
			return
		}
		var last *rule
		of := r.index.Of(o)
		for numbers := of.Next(); numbers != nil; numbers = of.Next() {
			for _, n := range numbers {
				e := &r.rules.entries.Resources[n]
				if !e.Match.Match(o) || e.Rule == last || e.Rule.can&r.may == 0 {
					continue
				}
				if last = e.Rule; !yield(last) {
					return
				}
			}
		}
	}
}

// DecidePath returns the faults to inject into a non-resource request to the apiserver,
// nil if there are none. verb is the method in lower case.
func (r *Rules) DecidePath(now time.Time, verb, path string) *Faults {
	if r == nil {
		return nil
	}
	d := decision{now: now, rules: r}
	var last *rule
	for _, e := range r.entries.Paths {
		if e.Rule != last && e.Match.Match(verb, path) {
			last = e.Rule
			d.add(last, last.can&possible(""))
		}
	}
	return d.faults
}

// DecideHTTP returns the faults to inject into a request to another host, or into an
// opaque connection, nil if there are none. Rules that need what is not seen do not
// match. asked has several elements if CONNECTs name further hosts: a rule that matches
// any of them applies once. Rules in met are skipped. If met is not nil, the other rules
// that match are added to it.
func (r *Rules) DecideHTTP(now time.Time, met Met, asked ...match.HTTP) *Faults {
	if r == nil {
		return nil
	}
	d := decision{now: now, rules: r}
	var last *rule
	for n := range r.found(asked) {
		e := &r.entries.URLs[n]
		if e.Rule != last {
			last = e.Rule
			if met.add(last) {
				d.add(last, last.can&possible(""))
			}
		}
	}
	return d.faults
}

// found yields the indexes of the entries that match one of the targets of a request, in
// order.
func (r *Rules) found(asked []match.HTTP) iter.Seq[int32] {
	return func(yield func(int32) bool) {
		if len(asked) == 1 {
			of, sure := r.entries.Hosts.Of(asked[0].Host)
			for _, n := range of {
				if r.entries.URLs[n].Match.MatchFound(&asked[0], sure) == match.Yes && !yield(n) {
					return
				}
			}
			return
		}
		all, _ := r.entries.Hosts.Of("")
		hosts := make([]hostEntries, len(asked))
		for i := range asked {
			hosts[i].of, hosts[i].sure = r.entries.Hosts.Of(asked[i].Host)
		}
		for _, n := range all {
			for i := range asked {
				if _, ok := slices.BinarySearch(hosts[i].of, n); ok && r.entries.URLs[n].Match.MatchFound(&asked[i], hosts[i].sure) == match.Yes {
					if !yield(n) {
						return
					}
					break
				}
			}
		}
	}
}

// hostEntries is what [match.Hosts.Of] returns.
type hostEntries struct {
	of   []int32
	sure bool
}

// Met is a set of rules that matched a request, whether or not they injected a fault.
type Met map[*counts]struct{}

// add adds a rule, and reports whether it was missing. A nil Met stays empty.
func (m Met) add(r *rule) bool {
	_, known := m[r.counts]
	if m != nil {
		m[r.counts] = struct{}{}
	}
	return !known
}

// Decrypts reports whether a rule needs the requests within a TLS connection, either to
// match them or to inject a fault into a single one. asked is what is seen of the
// connection.
func (r *Rules) Decrypts(asked *match.HTTP) bool {
	if r == nil {
		return false
	}
	of, sure := r.entries.Hosts.Of(asked.Host)
	return slices.ContainsFunc(of, func(n int32) bool {
		e := &r.entries.URLs[n]
		verdict := e.Match.MatchFound(asked, sure)
		return verdict == match.Unseen || verdict == match.Yes && e.Rule.can&ofRequests != 0
	})
}

// Hosts returns the matches of other hosts; nil without rules.
func (r *Rules) Hosts() *match.Hosts {
	if r == nil {
		return nil
	}
	return r.entries.Hosts
}
