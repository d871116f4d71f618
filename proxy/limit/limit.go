// Package limit counts a pod's requests, refuses those above the limits of its rules,
// and opens circuit breakers. It is pure except for locks: the caller passes the time.
//
// A [Store] keeps the counts by the rules' keys, so that they survive policies that do
// not change the rule, and the takeover by another agent.
//
// # Which rule applies
//
// One rule of each CircuitBreaker applies to a request. It is the rule of the matching
// entry with the fewest wildcards. Among entries with equally few, the first in the spec
// applies. A request passes if all CircuitBreakers allow it. A refused request counts
// only in the rule that refused it.
//
// # Shared limits
//
// A pod's share of a bucket is an n-th of its size and an n-th of its rate. If the
// bucket has fewer tokens than pods, they take turns instead (turns.go). Pods
// together never pass more than burst + rate*time. So a share that grows, or that a
// pod gets for the first time, starts without additional tokens and fills with time.
//
// There is one exception: during a takeover both agents count separately, from the first
// export until the connections of the old agent have ended. Meanwhile a pod may pass up
// to twice its bucket.
package limit

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Ticket represents a request that is under way in the rules that count it. The zero
// Ticket counts nowhere.
type Ticket struct {
	started time.Time
	first   claim
	rest    []claim
}

// claim is what a request takes from one rule.
type claim struct {
	state *state
	flies bool   // it counts as in flight
	probe uint64 // number of the probe; 0: the request is no probe
}

// Outcome is the result of a request.
type Outcome struct {
	// Failed means that the answer was 5xx or 429, or that there was none although the
	// client still waited.
	Failed bool
	// Unknown means that the client disconnected before there was a result. The request
	// counts nowhere, unless it was slow by then.
	Unknown bool
	// Took is the time until the answer; 0 if it does not count.
	Took time.Duration
}

// Done records the outcome of a request that has ended. Call either Done, or both
// Answered and Leave, exactly once.
func (t Ticket) Done(now time.Time, o Outcome) {
	t.Answered(now, o)
	t.Leave()
}

// Answered records the outcome of a request that may still be under way.
func (t Ticket) Answered(now time.Time, o Outcome) {
	if t.first.state == nil {
		return
	}
	t.first.state.answered(t.first, t.started, now, o)
	for _, h := range t.rest {
		h.state.answered(h, t.started, now, o)
	}
}

// of reports whether the rule with state s counted the ticket.
func (t Ticket) of(s *state) bool {
	return t.first.state == s || slices.ContainsFunc(t.rest, func(h claim) bool { return h.state == s })
}

// Leave records that a request has ended: it is not in flight any more.
func (t Ticket) Leave() {
	t.first.leave()
	for _, h := range t.rest {
		h.leave()
	}
}

func (c claim) leave() {
	if c.flies {
		c.state.mu.Lock()
		defer c.state.mu.Unlock()
		c.state.inFlight--
	}
}

// Refusal is which rule refused a request, and why.
type Refusal struct {
	Breaker, Rule string
	// Opened means that the breaker is open; else the request is above a limit.
	Opened bool
	// Reason is the value of a metric label: "bucket", "in_flight", "backoff", "opened"
	// or "forced".
	Reason string
	// RetryAfter is the minimum time until a retry. It is 0 if that is unknown, or if a
	// retry cannot succeed because the bucket is never refilled.
	RetryAfter time.Duration
}

// Message returns the message to the client. The rule's CircuitBreaker is in the namespace.
func (r *Refusal) Message(namespace string) string {
	rule := fmt.Sprintf("rule %q of CircuitBreaker %s/%s", r.Rule, namespace, r.Breaker)
	why := map[string]string{
		"forced":    "refuses all requests: its triggerPolicy is ForceOpened",
		"opened":    "has opened",
		"bucket":    "allows no more requests at this rate",
		"in_flight": "allows no more requests at the same time",
		"backoff":   "waits after failed requests",
	}[r.Reason]
	switch {
	case r.RetryAfter > 0:
		return fmt.Sprintf("%s %s: try again in %d s", rule, why, r.RetrySeconds())
	case r.Reason == "opened":
		return fmt.Sprintf("%s %s, and stays open until its annotation %s changes", rule, why, v1alpha1.RecoverAnnotation)
	case r.Reason == "bucket":
		return fmt.Sprintf("%s has an empty bucket that is never refilled: raise bucket.limit", rule)
	}
	return rule + " " + why
}

// RetrySeconds returns RetryAfter, rounded up.
func (r *Refusal) RetrySeconds() int {
	d := r.RetryAfter
	return int(min((d+min(time.Second-1, math.MaxInt64-d))/time.Second, math.MaxInt32))
}

// Resources are the rules that may match requests of one kind. Nil has no rules.
type Resources struct {
	rules *Rules
	index *match.Index
	flies bool
}

// Take decides about a request for a resource. If the refusal is nil, the request is in
// flight until the caller ends the ticket with Done or Leave.
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

// TakePath decides about a non-resource request to the apiserver, as Take.
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

// TakeHTTP decides about a request to another host, or about an opaque connection, as
// Take. Rules that need what is not seen do not match. asked has several elements if
// CONNECTs name further hosts: a rule that matches any of them counts one request. Rules
// that counted partOf, the CONNECT around the request, are skipped.
func (r *Rules) TakeHTTP(now time.Time, partOf Ticket, userAgent string, asked ...match.HTTP) (Ticket, *Refusal) {
	if r == nil {
		return Ticket{}, nil
	}
	found := r.deciding(partOf, userAgent, asked)
	return found.take(now, true)
}

// Shut reports whether a rule that is ForceOpened refuses the request. It counts
// nothing.
func (r *Rules) Shut(userAgent string, asked ...match.HTTP) bool {
	if r == nil {
		return false
	}
	found := r.deciding(Ticket{}, userAgent, asked)
	return slices.ContainsFunc(found.rules(), func(r *rule) bool {
		return r.state.config.trigger == meshv1.Trigger_TRIGGER_FORCE_OPENED
	})
}

// deciding returns the rules that apply to a request to another host, except those that
// counted partOf. None of the latter is ForceOpened, since the trigger of a state never
// changes.
func (r *Rules) deciding(partOf Ticket, userAgent string, asked []match.HTTP) (found found) {
	for j := range asked {
		decided := -1
		of, sure := r.entries.Hosts.Of(asked[j].Host)
		for _, n := range of {
			e := &r.entries.URLs[n]
			if e.Rule.number == decided || e.Match.MatchFound(&asked[j], sure) != match.Yes || len(e.Rule.agents) > 0 && (asked[j].Opaque || !e.Rule.agents.Match(userAgent)) {
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

// Hosts returns the matches of other hosts; nil without rules.
func (r *Rules) Hosts() *match.Hosts {
	if r == nil {
		return nil
	}
	return r.entries.Hosts
}

// Decrypts reports whether a rule needs the requests within a TLS connection, either to
// match them or to count them. asked is what is seen of the connection.
func (r *Rules) Decrypts(asked *match.HTTP) bool {
	if r == nil {
		return false
	}
	decided := -1
	of, sure := r.entries.Hosts.Of(asked.Host)
	for _, n := range of {
		e := &r.entries.URLs[n]
		if e.Rule.number == decided {
			continue
		}
		switch e.Match.MatchFound(asked, sure) {
		case match.Unseen:
			return true
		case match.Yes:
			if len(e.Rule.agents) > 0 || !e.Rule.state.config.forced() {
				return true
			}
			decided = e.Rule.number
		}
	}
	return false
}

// found are the rules that apply to a request, by the elements of asked and then in the
// order of their CircuitBreakers.
type found struct {
	few  [4]*rule // usually sufficient; avoids an allocation
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

// take counts the request in all rules, or in none if one refuses it.
func (f *found) take(now time.Time, flies bool) (Ticket, *Refusal) {
	rules := f.rules()
	if len(rules) == 0 {
		return Ticket{}, nil
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
	t := Ticket{started: now, first: rules[0].state.take(now, flies), rest: make([]claim, 0, len(rules)-1)}
	for _, r := range rules[1:] {
		t.rest = append(t.rest, r.state.take(now, flies))
	}
	return t, nil
}

// lock locks the rules' states in the order of their ids, to avoid deadlocks.
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

// check calls check of the state, and adds the rule's name to a refusal. The caller must
// hold the state's lock.
func (r *rule) check(now time.Time, flies bool) *Refusal {
	refusal := r.state.check(now, flies)
	if refusal != nil {
		r.state.totals.refused++
		refusal.Breaker, refusal.Rule = r.breaker, r.name
	}
	return refusal
}
