// Package limit counts a pod's requests, refuses those beyond its rules, and opens
// circuit breakers. It is pure but for locks: the time is told to it.
//
// What was counted is kept in a [Store] by the rules' keys, so that it outlives
// policies that do not touch a rule, and the agent.
//
// # Which rule
//
// Of a CircuitBreaker's rules one decides, alone: of the entries that match a request
// the one with the fewest wildcards, and of those with as few the one written first.
// All CircuitBreakers must let a request pass; one that is refused counts in the rule
// that refused it and nowhere else.
//
// # Together
//
// A member's share of a bucket is an n-th of it with an n-th of its rate; of one
// that has fewer tokens than members, turns in time (turns.go). Members together never
// pass more than burst + rate*time. So a share that grows, or comes after there was
// none, fills with time alone.
//
// There is one exception: while one agent hands a pod over to the next, each counts
// what it serves by itself, from the first export until the connections of the former
// have ended. Meanwhile a pod may pass twice its bucket at most.
package limit

import (
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Ticket is of a request that is under way. The zero Ticket counts nowhere.
type Ticket struct {
	started time.Time
	first   held
	rest    []held
}

// held is what a request holds of one rule.
type held struct {
	*state
	flies bool   // it has a place among those in flight
	probe uint64 // 0: it is none
}

// Outcome is what became of a request.
type Outcome struct {
	// Failed: answered 5xx or 429, or not at all though the client still waited.
	Failed bool
	// Unknown: the client went away, and nobody will know. It counts nowhere, unless
	// it was slow by then.
	Unknown bool
	// Took is how long the answer was waited for; 0 for one that does not count.
	Took time.Duration
}

// Done says what became of a request that is over. Either it or both Answered and
// Leave must be called, once.
func (t Ticket) Done(now time.Time, o Outcome) {
	t.Answered(now, o)
	t.Leave()
}

// Answered says what became of a request, which may go on.
func (t Ticket) Answered(now time.Time, o Outcome) {
	if t.first.state == nil {
		return
	}
	t.first.answered(t.first, t.started, now, o)
	for _, h := range t.rest {
		h.answered(h, t.started, now, o)
	}
}

// of reports whether a rule with that state gave the ticket.
func (t Ticket) of(s *state) bool {
	return t.first.state == s || slices.ContainsFunc(t.rest, func(h held) bool { return h.state == s })
}

// Leave gives back the place of a request that is over.
func (t Ticket) Leave() {
	t.first.leave()
	for _, h := range t.rest {
		h.leave()
	}
}

func (h held) leave() {
	if h.flies {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.inFlight--
	}
}

// Refusal says which rule refused a request and why.
type Refusal struct {
	Breaker, Rule string
	// Opened: the breaker is open; else the request is beyond a limit.
	Opened bool
	// Reason is one of a few words, for metrics: "bucket", "in_flight", "backoff",
	// "opened", "forced".
	Reason string
	// RetryAfter is when to try again, at least; 0 if nobody knows, or never: a bucket that
	// is not filled again.
	RetryAfter time.Duration
}

// Resources are the rules that may be about requests of one kind. Nil: none is.
type Resources struct {
	rules *Rules
	index *match.Index
	flies bool
}

// Take decides about a request for a resource. Without a refusal the ticket must be
// done with when the request is over; until then it is in flight.
func (r *Resources) Take(now time.Time, o *match.Object, userAgent string) (Ticket, *Refusal) {
	if r == nil {
		return Ticket{}, nil
	}
	var found found
	decided := -1
	of := r.index.Of(o)
	for numbers := of.Next(); numbers != nil; numbers = of.Next() {
		for _, n := range numbers {
			if e := &r.rules.entries.Resources[n]; e.Rule.number != decided && e.Match.Match(o) && e.Rule.agents.Match(userAgent) {
				found.add(e.Rule.rule)
				decided = e.Rule.number
			}
		}
	}
	return found.take(now, r.flies)
}

// TakePath decides about a request to the apiserver for no resource.
func (r *Rules) TakePath(now time.Time, verb, path, userAgent string) (Ticket, *Refusal) {
	if r == nil {
		return Ticket{}, nil
	}
	var found found
	decided := -1
	for i := range r.entries.Paths {
		if e := &r.entries.Paths[i]; e.Rule.number != decided && e.Match.Match(verb, path) && e.Rule.agents.Match(userAgent) {
			found.add(e.Rule.rule)
			decided = e.Rule.number
		}
	}
	return found.take(now, true)
}

// TakeHTTP decides about a request to another host, or a connection if no more is
// seen: rules that would have to see more are left out. If asked are several, it is for
// all of them at once, and a rule about more than one takes it as one. What is part of
// something else is left to those rules that gave no ticket for that.
func (r *Rules) TakeHTTP(now time.Time, partOf Ticket, userAgent string, asked ...match.HTTP) (Ticket, *Refusal) {
	if r == nil {
		return Ticket{}, nil
	}
	found := r.deciding(partOf, userAgent, asked)
	return found.take(now, true)
}

// Shut reports whether a rule that is ForceOpened refuses what is asked, which counts
// nowhere.
func (r *Rules) Shut(userAgent string, asked ...match.HTTP) bool {
	if r == nil {
		return false
	}
	found := r.deciding(Ticket{}, userAgent, asked)
	return slices.ContainsFunc(found.rules(), func(r *rule) bool {
		return r.state.trigger == meshv1.Trigger_TRIGGER_FORCE_OPENED
	})
}

// deciding are the rules that decide about what is asked of other hosts, but for those
// that gave a ticket for what it is part of. None did that is ForceOpened: a state has
// one trigger.
func (r *Rules) deciding(partOf Ticket, userAgent string, asked []match.HTTP) (found found) {
	for j := range asked {
		decided := -1
		for _, n := range r.entries.Hosts.Of(asked[j].Host) {
			e := &r.entries.URLs[n]
			if e.Rule.number == decided || e.Match.Match(&asked[j]) != match.Yes || len(e.Rule.agents) > 0 && (asked[j].Opaque || !e.Rule.agents.Match(userAgent)) {
				continue
			}
			decided = e.Rule.number
			if !partOf.of(e.Rule.state) && (j == 0 || !slices.Contains(found.rules(), e.Rule.rule)) {
				found.add(e.Rule.rule)
			}
		}
	}
	return found
}

// Deep reports whether a rule asks for more of requests to a host than its name.
func (r *Rules) Deep(host string) bool { return r != nil && r.entries.Hosts.Deep(host) }

// Decrypts reports whether a rule is about the requests in TLS of which asked is seen: to
// report whether it matches them, or to count them.
func (r *Rules) Decrypts(asked *match.HTTP) bool {
	if r == nil {
		return false
	}
	decided := -1
	for _, n := range r.entries.Hosts.Of(asked.Host) {
		e := &r.entries.URLs[n]
		if e.Rule.number == decided {
			continue
		}
		switch e.Match.Match(asked) {
		case match.Unseen:
			return true
		case match.Yes:
			if len(e.Rule.agents) > 0 || !e.Rule.state.forced() {
				return true
			}
			decided = e.Rule.number
		}
	}
	return false
}

// found are the rules that decide about a request, as it asks and as their CircuitBreakers
// are sorted.
type found struct {
	few  [4]*rule // most often that is enough
	n    int
	more []*rule
}

func (f *found) add(r *rule) {
	if f.n < len(f.few) {
		f.few[f.n] = r
	} else {
		if f.n == len(f.few) {
			f.more = append(f.more, f.few[:]...)
		}
		f.more = append(f.more, r)
	}
	f.n++
}

func (f *found) rules() []*rule {
	if f.more != nil {
		return f.more
	}
	return f.few[:f.n]
}

// take takes from all rules or from none.
func (f *found) take(now time.Time, flies bool) (Ticket, *Refusal) {
	rules := f.rules()
	switch len(rules) {
	case 0:
		return Ticket{}, nil
	case 1:
		r := rules[0]
		r.state.mu.Lock()
		defer r.state.mu.Unlock()
		if refusal := r.check(now, flies); refusal != nil {
			return Ticket{}, refusal
		}
		return Ticket{started: now, first: r.state.take(now, flies)}, nil
	}
	var few [4]*state
	locked := lock(few[:0], rules)
	defer func() {
		for _, s := range locked {
			s.mu.Unlock()
		}
	}()
	for _, r := range rules {
		if refusal := r.check(now, flies); refusal != nil {
			return Ticket{}, refusal
		}
	}
	t := Ticket{started: now, first: rules[0].state.take(now, flies), rest: make([]held, 0, len(rules)-1)}
	for _, r := range rules[1:] {
		t.rest = append(t.rest, r.state.take(now, flies))
	}
	return t, nil
}

// lock locks the rules' states, always in the same order.
func lock(states []*state, rules []*rule) []*state {
	for _, r := range rules {
		i := len(states)
		states = append(states, r.state)
		for ; i > 0 && states[i-1].id > r.state.id; i-- {
			states[i] = states[i-1]
		}
		states[i] = r.state
	}
	for _, s := range states {
		s.mu.Lock()
	}
	return states
}

// check is that of the state, with the rule's name. The state's lock is held.
func (r *rule) check(now time.Time, flies bool) *Refusal {
	refusal := r.state.check(now, flies)
	if refusal != nil {
		r.state.refused++
		refusal.Breaker, refusal.Rule = r.breaker, r.name
	}
	return refusal
}
