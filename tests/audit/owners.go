package audit

import (
	"fmt"
	"slices"
	"time"
)

// Judgement is what became of the promise that no key ever has two owners.
type Judgement struct {
	Writes int
	// Foreign are writes that reached the apiserver while the writer's shard did
	// not hold their namespace. Also those that the apiserver then refused: it did
	// so for another reason.
	Foreign []Foreign
	// Unknown are writes by pods that were never assigned to a shard.
	Unknown []Request
	// Shared are the states by which two shards held a key.
	Shared []string
}

// Foreign is a write that its shard had no right to.
type Foreign struct {
	Request
	Shard string
	// Holder is the shard that held the namespace when the request came, "" if none did.
	Holder string
}

// String tells of the write in one line.
func (f Foreign) String() string {
	return fmt.Sprintf("%s wrote in %s, which %q held: until %s: %s", f.Shard, f.Namespace, f.Holder, f.Ended.UTC().Format(time.RFC3339Nano), f.Request)
}

// Judge decides for each write whether the shard of its pod held the namespace all
// the time that the request was under way. Keys that a shard is given are its own
// when the state that says so has been written, and keys that it gives are no more
// when the state that says so comes to be written: so the times of two owners do not
// touch. A write without an end, because the apiserver was killed, is judged by its
// beginning.
//
// An apiserver that is killed may leave a state unrecorded. The first state that is
// known after one of the restarts counts, for what it gives, from the last one
// before; but not before the other shards' last write, so that of two shards who
// write in turns one is still found out.
//
// States must be those of one root since it was made, oldest first.
func Judge(states []State, writes []Request, restarts []time.Time) Judgement {
	j := Judgement{Writes: len(writes)}
	for _, s := range states {
		if shared := s.Shared(); shared != "" {
			j.Shared = append(j.Shared, shared)
		}
	}
	shards := map[string]string{} // by pod uid
	for _, s := range states {
		for _, a := range s.Root.Assignments {
			shards[a.UID] = a.Shard
		}
	}
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
				j.Foreign = append(j.Foreign, Foreign{w, shard, t.holder(w.Received)})
			}
		}
	}
	slices.SortFunc(j.Foreign, func(a, b Foreign) int { return a.Received.Compare(b.Received) })
	return j
}

// times says when a namespace was whose.
type times struct {
	namespace string
	states    []State
	restarts  []time.Time
	writes    []Request // in the namespace
	shards    map[string]string
}

// period is a time of ownership; without an end it lasts.
type period struct{ from, to time.Time }

func (p period) covers(w Request) bool {
	end := w.Ended
	if end.IsZero() {
		end = w.Received
	}
	return !w.Received.Before(p.from) && (p.to.IsZero() || !end.After(p.to))
}

// of are the periods of a shard.
func (t *times) of(shard string) []period {
	out := []period{} // not nil: it is known
	holds := false
	for i, s := range t.states {
		held := s.held[shard].Owns(t.namespace)
		switch {
		case held && !holds:
			out = append(out, period{from: t.given(i, shard)})
		case !held && holds:
			out[len(out)-1].to = s.Received
		}
		holds = held
	}
	return out
}

// given is when a shard was given the namespace that it holds in a state, but not in
// that before.
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

// holder is the shard that held the namespace at a time.
func (t *times) holder(at time.Time) string {
	holder := ""
	for _, s := range t.states {
		if s.Ended.After(at) {
			break
		}
		holder = s.Holder(t.namespace)
	}
	return holder
}
