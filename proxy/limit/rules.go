package limit

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Rules are the limits of one policy. They are immutable. Nil has no rules.
type Rules struct {
	store  *Store
	states map[string]*state // by key
	all    []*rule

	entries match.Entries[numbered] // by CircuitBreaker, the most specific first
}

// numbered is a rule with the number of its CircuitBreaker. The number is copied because
// matching reads it for each entry, but the rule for few.
type numbered struct {
	number int
	*rule
}

// rule is one rule of a policy.
type rule struct {
	breaker, name string
	agents        match.Patterns
	somePods      bool
	state         *state
	share         share
	recover       string
}

// Name is the name of a rule and of its CircuitBreaker, in the pod's namespace.
type Name struct{ Breaker, Rule string }

// Names returns the names of all rules.
func (r *Rules) Names() []Name {
	if r == nil {
		return nil
	}
	out := make([]Name, 0, len(r.all))
	for _, rule := range r.all {
		out = append(out, Name{rule.breaker, rule.name})
	}
	return out
}

// Opened returns the names of the rules whose breakers are not closed.
func (r *Rules) Opened() (names []Name) {
	if r == nil {
		return nil
	}
	for _, of := range r.all {
		if of.state.report().GetState() != closed {
			names = append(names, Name{of.breaker, of.name})
		}
	}
	return names
}

// Compile returns the rules of m, which count in s. Some time after [Rules.Enforce], s
// forgets the counts of other keys.
func Compile(m *meshv1.Traffic, s *Store, now time.Time) (*Rules, error) {
	out := &Rules{store: s, states: map[string]*state{}}
	for number, b := range m.GetBreakers() {
		for _, l := range b.GetRules() {
			r := &rule{
				breaker: b.GetName(), name: l.GetName(), agents: l.GetUserAgents(), somePods: l.GetSomePods(),
				recover: l.GetRecover(),
			}
			err := r.count(l, out, now)
			if err == nil {
				err = out.entries.Add(numbered{number, r}, l.GetResources(), l.GetPaths(), l.GetHttp())
			}
			if err != nil {
				return nil, fmt.Errorf("rule %q of CircuitBreaker %q: %w", l.GetName(), b.GetName(), err)
			}
			out.all = append(out.all, r)
		}
	}
	slices.SortStableFunc(out.entries.Resources, inOrder)
	slices.SortStableFunc(out.entries.Paths, inOrder)
	slices.SortStableFunc(out.entries.URLs, inOrder)
	out.entries.Index()
	return out, nil
}

// count sets the share and the state of a rule, which is one of those in rules.
func (r *rule) count(m *meshv1.LimitRule, rules *Rules, now time.Time) error {
	c, err := newConfig(m)
	if err != nil {
		return err
	}
	if r.share, err = newShare(m.GetShare()); err != nil {
		return err
	}
	r.state, err = rules.store.Add(rules.states, m.GetKey(), newState(m.GetKey(), c, r.share, r.recover), now)
	return err
}

func inOrder[M interface{ Wildcards() int }](a, b match.Entry[M, numbered]) int {
	return cmp.Or(cmp.Compare(a.Rule.number, b.Rule.number), cmp.Compare(a.Rule.wildcards(a.Match), b.Rule.wildcards(b.Match)))
}

// wildcards returns the number of wildcards of an entry, those of the rule included.
func (r *rule) wildcards(entry interface{ Wildcards() int }) int {
	n := entry.Wildcards()
	if len(r.agents) == 0 {
		n++
	}
	if !r.somePods {
		n++
	}
	return n
}

// Enforce makes these the rules in force. The store forgets the counts of other rules
// later.
func (r *Rules) Enforce(now time.Time) {
	if r == nil {
		return
	}
	r.store.Enforce(now, r.states)
	for _, of := range r.all {
		of.state.enforce(now, of.share, of.recover)
	}
}

// OfKind returns the rules that may match requests of a kind, nil if there are none.
// Plans keep the result.
func (r *Rules) OfKind(k match.Kind) *Resources {
	if r == nil {
		return nil
	}
	index := r.entries.Table.OfKind(k)
	if index == nil {
		return nil
	}
	return &Resources{rules: r, index: index, flies: k.Verb != "watch"}
}

// Paths reports whether any rule matches non-resource requests.
func (r *Rules) Paths() bool { return r != nil && len(r.entries.Paths) > 0 }
