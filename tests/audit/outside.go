package audit

import (
	"slices"
	"time"
)

// Outside returns the writes, by pods that were never members, that were under way
// while a shard held their namespace: a second owner from outside the mesh.
//
// A shard may act on a key from the moment that the state which says so has been
// written, until the state which takes it is being written. A write without an end
// is judged by its beginning. States must be oldest first.
func Outside(states []State, writes []Request) []Foreign {
	var out []Foreign
	for _, w := range writes {
		end := w.Ended
		if end.IsZero() {
			end = w.Received
		}
		for _, p := range heldTimes(states, w.Namespace) {
			if end.After(p.from) && (p.to.IsZero() || w.Received.Before(p.to)) {
				out = append(out, Foreign{Request: w, Shard: "(outside)", Holder: p.shard})
				break
			}
		}
	}
	return out
}

// heldTime is a time in which a shard may act on a namespace.
type heldTime struct {
	shard string
	period
}

// heldTimes are the times in which any shard may act on a namespace, oldest first.
func heldTimes(states []State, namespace string) []heldTime {
	var out []heldTime
	holder := ""
	for _, s := range states {
		next := s.Holder(namespace)
		if next == holder {
			continue
		}
		if holder != "" {
			out[len(out)-1].to = s.Received
		}
		if next != "" {
			out = append(out, heldTime{next, period{from: s.Ended}})
		}
		holder = next
	}
	return out
}

// Turns returns the writes that took a namespace's turn without having been given it:
// of two shards that write in one namespace, the later must have been given it by a
// state that was written after the earlier one's last write ended and before its own
// first. It says less than Judge, and needs no history without gaps: after etcd was
// restored from a backup, the states in force are not all in the log.
//
// Writes by pods that no state assigns to a shard are left out. A write without an
// end is judged by its beginning.
func Turns(states []State, writes []Request) []Foreign {
	shards := map[string]string{} // by pod uid
	for _, s := range states {
		for _, a := range s.Root.Assignments {
			shards[a.UID] = a.Shard
		}
	}
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
				out = append(out, Foreign{Request: w, Shard: shard, Holder: writer})
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

// givenBetween reports whether a state that was written between two times says that a
// shard holds a namespace.
func givenBetween(states []State, namespace, shard string, after, before time.Time) bool {
	return slices.ContainsFunc(states, func(s State) bool {
		return !s.Ended.Before(after) && !s.Received.After(before) && s.held[shard].Owns(namespace)
	})
}
