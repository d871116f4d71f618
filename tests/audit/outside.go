package audit

import (
	"slices"
	"time"
)

// Outside returns the writes in flight, by pods that were never members, while a shard owned
// their namespace: a second owner from outside the mesh.
//
// A shard may write the objects of a key from the end of the request that writes the state
// in which it owns the key, to the beginning of the request that writes the next state. A
// write without an end is judged by its beginning. States must be oldest first.
func Outside(states []State, writes []Request) []Foreign {
	var out []Foreign
	for _, w := range writes {
		for _, p := range ownedTimes(states, w.Namespace) {
			if w.End().After(p.from) && (p.to.IsZero() || w.Received.Before(p.to)) {
				out = append(out, Foreign{Request: w, Shard: "(outside)", Owner: p.shard})
				break
			}
		}
	}
	return out
}

// Beside returns the writes of Judgement.Foreign in flight while another shard owned their
// namespace. The others are no second owner: a pod that is in no shard any more, as under a
// dry run, may write what no shard owns.
func Beside(states []State, foreign []Foreign) []Foreign {
	owned := map[string][]ownedTime{} // by namespace
	return slices.DeleteFunc(slices.Clone(foreign), func(f Foreign) bool {
		if _, known := owned[f.Namespace]; !known {
			owned[f.Namespace] = ownedTimes(states, f.Namespace)
		}
		return !slices.ContainsFunc(owned[f.Namespace], func(p ownedTime) bool {
			return p.shard != f.Shard && f.End().After(p.from) && (p.to.IsZero() || f.Received.Before(p.to))
		})
	})
}

// ownedTime is a period in which a shard may write in a namespace.
type ownedTime struct {
	shard string
	period
}

// ownedTimes returns the periods in which any shard may write in a namespace, oldest first.
func ownedTimes(states []State, namespace string) []ownedTime {
	var out []ownedTime
	owner := ""
	for _, s := range states {
		next := s.Owner(namespace)
		if next == owner {
			continue
		}
		if owner != "" {
			out[len(out)-1].to = s.Received
		}
		if next != "" {
			out = append(out, ownedTime{next, period{from: s.Ended}})
		}
		owner = next
	}
	return out
}

// Turns returns the writes of a shard in a namespace that it did not get from the shard that
// wrote there before: a state that gives it the namespace must be written after the last
// write of the other shard ended and before its own first write. Turns detects less than
// Check, but the states may have gaps: after a restore of etcd from a backup, the log lacks
// some of the states in force.
//
// Turns skips writes by pods that no state assigns to a shard. A write without an end is
// judged by its beginning.
func Turns(states []State, writes []Request) []Foreign {
	shards := shardsByPod(states)
	in := map[string][]Request{} // by namespace
	for _, w := range writes {
		if shards[w.PodUID] != "" {
			in[w.Namespace] = append(in[w.Namespace], w)
		}
	}
	var out []Foreign
	for namespace, all := range in {
		slices.SortStableFunc(all, func(a, b Request) int { return a.Received.Compare(b.Received) })
		var writer string
		var last time.Time // end of the latest of the writer's writes
		for _, w := range all {
			shard := shards[w.PodUID]
			if writer != "" && shard != writer && !givenBetween(states, namespace, shard, last, w.Received) {
				out = append(out, Foreign{Request: w, Shard: shard, Owner: writer})
			}
			if shard != writer {
				writer, last = shard, time.Time{}
			}
			if w.Ended.After(last) {
				last = w.Ended
			}
			if w.Received.After(last) {
				last = w.Received
			}
		}
	}
	slices.SortFunc(out, func(a, b Foreign) int { return a.Received.Compare(b.Received) })
	return out
}

// givenBetween reports whether a shard owns a namespace in a state that was written between
// two times.
func givenBetween(states []State, namespace, shard string, after, before time.Time) bool {
	return slices.ContainsFunc(states, func(s State) bool {
		return !s.Ended.Before(after) && !s.Received.After(before) && s.owned[shard].Owns(namespace)
	})
}
