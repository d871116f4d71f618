package push

import (
	"maps"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// ruleStates is what an agent says of a pod's rules, as far as they are its policy's
// and can be: nothing else is kept.
func ruleStates(t *meshv1.Traffic, said []*meshv1.RuleState) map[string]*meshv1.RuleState {
	if len(said) == 0 {
		return nil
	}
	out := map[string]*meshv1.RuleState{}
	for _, b := range t.GetBreakers() {
		for _, r := range b.Rules {
			out[r.Key] = nil
		}
	}
	latest := time.Now().Add(time.Hour).UnixMilli() // clocks differ
	for _, s := range said {
		if was, ours := out[s.GetKey()]; !ours || was != nil {
			continue
		}
		is := &meshv1.RuleState{Key: s.Key, State: s.State, Passed: s.Passed, Refused: s.Refused}
		if _, known := meshv1.BreakerState_name[int32(s.State)]; !known {
			is.State = meshv1.BreakerState_BREAKER_CLOSED
		}
		if s.SinceMs > 0 && s.SinceMs < latest {
			is.SinceMs = s.SinceMs
		}
		if s.Share.GetIndex() < s.Share.GetOf() {
			is.Share = &meshv1.Share{Index: s.Share.Index, Of: s.Share.Of}
		}
		out[s.Key] = is
	}
	maps.DeleteFunc(out, func(_ string, s *meshv1.RuleState) bool { return s == nil })
	return out
}

func faultStates(t *meshv1.Traffic, said []*meshv1.FaultState) map[string]*meshv1.FaultState {
	if len(said) == 0 {
		return nil
	}
	out := map[string]*meshv1.FaultState{}
	for _, i := range t.GetInjections() {
		for _, r := range i.Rules {
			out[r.Key] = nil
		}
	}
	for _, s := range said {
		if was, ours := out[s.GetKey()]; ours && was == nil {
			out[s.Key] = &meshv1.FaultState{Key: s.Key, Matched: s.Matched, Injected: s.Injected}
		}
	}
	maps.DeleteFunc(out, func(_ string, s *meshv1.FaultState) bool { return s == nil })
	return out
}

// saysAs tells whether two observations differ in nothing but what rules have done.
func (o observation) saysAs(p observation) bool {
	return o.reported == p.reported && o.capture == p.capture && o.message == p.message && o.version == p.version &&
		o.nacked == p.nacked && o.nack == p.nack && o.holder == p.holder && o.dead == p.dead &&
		o.egress == p.egress && maps.Equal(o.methods, p.methods)
}
