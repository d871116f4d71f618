package push

import (
	"cmp"
	"reflect"
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// keyed is the state of a rule. Agents send them sorted by key.
type keyed interface{ GetKey() string }

// byKey returns the first state with a key, among states that are sorted by key.
func byKey[S keyed](said []S, key string) (of S, ok bool) {
	i, ok := slices.BinarySearchFunc(said, key, func(s S, key string) int { return cmp.Compare(s.GetKey(), key) })
	if ok {
		of = said[i]
	}
	return of, ok
}

func sortByKey[S keyed](said []S) {
	order := func(a, b S) int { return cmp.Compare(a.GetKey(), b.GetKey()) }
	if !slices.IsSortedFunc(said, order) {
		slices.SortStableFunc(said, order)
	}
}

// ruleStates returns the reported states of the rules of a policy, and omits all others. It
// replaces impossible values.
func ruleStates(t *meshv1.Traffic, said []*meshv1.RuleState) map[string]*meshv1.RuleState {
	if len(said) == 0 {
		return nil
	}
	sortByKey(said)
	latest := time.Now().Add(time.Hour).UnixMilli() // clocks may differ
	out := map[string]*meshv1.RuleState{}
	for _, b := range t.GetBreakers() {
		for _, r := range b.Rules {
			s, ok := byKey(said, r.Key)
			if !ok {
				continue
			}
			is := &meshv1.RuleState{Key: r.Key, State: s.GetState(), Passed: s.GetPassed(), Refused: s.GetRefused()}
			if _, known := meshv1.BreakerState_name[int32(is.State)]; !known {
				is.State = meshv1.BreakerState_BREAKER_CLOSED
			}
			if since := s.GetSinceMs(); since > 0 && since < latest {
				is.SinceMs = since
			}
			out[r.Key] = is
		}
	}
	return out
}

func faultStates(t *meshv1.Traffic, said []*meshv1.FaultState) map[string]*meshv1.FaultState {
	if len(said) == 0 {
		return nil
	}
	sortByKey(said)
	out := map[string]*meshv1.FaultState{}
	for _, i := range t.GetInjections() {
		for _, r := range i.Rules {
			if s, ok := byKey(said, r.Key); ok {
				out[r.Key] = &meshv1.FaultState{Key: r.Key, Matched: s.GetMatched(), Injected: s.GetInjected()}
			}
		}
	}
	return out
}

// saysAs reports whether two observations differ only in the states and counts of rules.
func (o Observation) saysAs(p Observation) bool {
	o.Rules, o.Faults, p.Rules, p.Faults = nil, nil, nil, nil
	return reflect.DeepEqual(o, p)
}
