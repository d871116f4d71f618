package audit

import (
	"fmt"
	"slices"
	"time"
)

// Findings are violations of the invariant that no key ever has two owners.
type Findings struct {
	Writes int
	// Foreign are writes that reached the apiserver while the writer's shard did not own
	// their namespace. They include those that the apiserver refused, for another reason.
	Foreign []Foreign
	// Unknown are writes by pods that were never assigned to a shard.
	Unknown []Request
	// Shared are the states in which two shards owned a key.
	Shared []string
}

// Foreign is a write by a shard that did not own the namespace.
type Foreign struct {
	Request
	Shard string
	// Owner is the shard that owned the namespace when the request was received, "" if none did.
	Owner string
}

// String describes the write in one line.
func (f Foreign) String() string {
	return fmt.Sprintf("%s wrote in %s, which %q owned: until %s: %s", f.Shard, f.Namespace, f.Owner, f.Ended.UTC().Format(time.RFC3339Nano), f.Request)
}

// Check decides for each write whether the shard of its pod owned the namespace during the
// whole request. A shard owns the keys that it gets from the end of the request that writes
// the state, and loses keys at the beginning of the request that writes the state. So the
// periods of two owners do not touch. A write without an end, because the apiserver was
// killed, is judged by its beginning.
//
// A killed apiserver may not have recorded a state. The first known state after a restart
// therefore counts, for the keys that it gives, from the last state before the restart, but
// not from before the other shards' last write: if two shards write in turns, one of them is
// still reported.
//
// States must be all of one root since its creation, oldest first.
func Check(states []State, writes []Request, restarts []time.Time) Findings {
	j := Findings{Writes: len(writes)}
	for _, s := range states {
		if shared := s.Shared(); shared != "" {
			j.Shared = append(j.Shared, shared)
		}
	}
	shards := shardsByPod(states)
	in := map[string][]Request{} // by namespace
	for _, w := range writes {
		if shards[w.PodUID] == "" {
			j.Unknown = append(j.Unknown, w)
			continue
		}
		in[w.Namespace] = append(in[w.Namespace], w)
	}
	for namespace, writes := range in {
		t := times{namespace: namespace, states: states, restarts: restarts, writes: writes, shards: shards}
		owned := map[string][]period{} // by shard
		for _, w := range writes {
			shard := shards[w.PodUID]
			if owned[shard] == nil {
				owned[shard] = t.of(shard)
			}
			if !slices.ContainsFunc(owned[shard], func(p period) bool { return p.covers(w) }) {
				j.Foreign = append(j.Foreign, Foreign{w, shard, t.owner(w.Received)})
			}
		}
	}
	slices.SortFunc(j.Foreign, func(a, b Foreign) int { return a.Received.Compare(b.Received) })
	return j
}

// times computes when each shard owned a namespace.
type times struct {
	namespace string
	states    []State
	restarts  []time.Time
	writes    []Request // in the namespace
	shards    map[string]string
}

// period is a period of ownership, which continues if it has no end.
type period struct{ from, to time.Time }

func (p period) covers(w Request) bool {
	return !w.Received.Before(p.from) && (p.to.IsZero() || !w.End().After(p.to))
}

// of returns the periods in which a shard owned the namespace.
func (t *times) of(shard string) []period {
	out := []period{} // not nil: nil means not computed
	owns := false
	for i, s := range t.states {
		owned := s.owned[shard].Owns(t.namespace)
		switch {
		case owned && !owns:
			out = append(out, period{from: t.given(i, shard)})
		case !owned && owns:
			out[len(out)-1].to = s.Received
		}
		owns = owned
	}
	return out
}

// given returns when a shard got the namespace that it owns in state i and not in the one
// before.
func (t *times) given(i int, shard string) time.Time {
	given := t.states[i].Ended
	if i == 0 {
		return given
	}
	before := t.states[i-1]
	if !slices.ContainsFunc(t.restarts, func(at time.Time) bool { return at.After(before.Received) && at.Before(given) }) {
		return given
	}
	last := before.Ended
	for _, w := range t.writes {
		if t.shards[w.PodUID] != shard && w.Received.Before(given) && w.Ended.After(last) {
			last = w.Ended
		}
	}
	return last
}

// owner returns the shard that owned the namespace at a time.
func (t *times) owner(at time.Time) string {
	owner := ""
	for _, s := range t.states {
		if s.Ended.After(at) {
			break
		}
		owner = s.Owner(t.namespace)
	}
	return owner
}

// shardsByPod returns the shards of pods, by uid.
func shardsByPod(states []State) map[string]string {
	shards := map[string]string{}
	for _, s := range states {
		for _, a := range s.Root.Assignments {
			shards[a.UID] = a.Shard
		}
	}
	return shards
}
