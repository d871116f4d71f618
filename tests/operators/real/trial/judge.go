package trial

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

// verdict is what the audit log shows of a trial.
type verdict struct {
	writes, outside int
	// twoOwners has a line for each write that a second owner of its key made.
	twoOwners []string
}

// turnaround is less than the lease duration of every operator: within it, leadership cannot
// leave a pod and come back.
const turnaround = 10 * time.Second

// judge decides for each write whether its pod alone could write in its namespace at the time.
// A member may write only what its shard owned, and a pod outside the mesh only what no shard
// owned. Several pods of one shard, or several outside, may write only one after the other.
func judge(states []audit.State, writes []audit.Request) verdict {
	j := audit.Check(states, writes, nil)
	v := verdict{writes: j.Writes, outside: len(j.Unknown), twoOwners: slices.Clone(j.Shared)}
	for _, f := range j.Foreign {
		if !afterRemoval(states, f.Request) {
			v.twoOwners = append(v.twoOwners, f.String())
		}
	}
	for _, w := range j.Unknown {
		if shard := ownedDuring(states, w); shard != "" {
			v.twoOwners = append(v.twoOwners, fmt.Sprintf("outside the mesh, while %s held %s: %s", shard, w.Namespace, w))
		}
	}
	return v.interleaved(writes)
}

// afterRemoval reports whether shards owned the namespace of a write before, and none owns
// anything at the time: a member may then act like any pod.
func afterRemoval(states []audit.State, w audit.Request) bool {
	before := false
	for i, s := range states {
		if s.Ended.Before(w.Received) && s.Owner(w.Namespace) != "" {
			before = true
		}
		if inForce(states, i, w) && slices.ContainsFunc(s.Root.Shards, func(shard meshv1alpha1.ShardStatus) bool { return len(shard.Held) > 0 }) {
			return false
		}
	}
	return before
}

// inForce reports whether the i-th state was in force at any time of a write. Between two states
// both may be.
func inForce(states []audit.State, i int, w audit.Request) bool {
	if states[i].Ended.After(w.End()) {
		return false
	}
	return i+1 == len(states) || !states[i+1].Received.Before(w.Received)
}

// ownedDuring returns a shard that owned the namespace at any time of a write, "" if none did.
func ownedDuring(states []audit.State, w audit.Request) string {
	for i, s := range states {
		if holder := s.Owner(w.Namespace); holder != "" && inForce(states, i, w) {
			return holder
		}
	}
	return ""
}

// interleaved adds the writes of a key by two pods at once, or in turns that are too short for a
// change of leaders.
func (v verdict) interleaved(writes []audit.Request) verdict {
	byKey := map[string][]audit.Request{}
	for _, w := range writes {
		byKey[w.Namespace] = append(byKey[w.Namespace], w)
	}
	for namespace, writes := range byKey {
		slices.SortFunc(writes, func(a, b audit.Request) int { return cmp.Compare(a.Received.UnixNano(), b.Received.UnixNano()) })
		last := map[string]time.Time{} // end of the last write, by pod
		previous := ""
		for _, w := range writes {
			at, again := last[w.PodUID]
			for pod, end := range last {
				if pod != w.PodUID && end.After(w.Received) {
					v.twoOwners = append(v.twoOwners, fmt.Sprintf("two pods at once in %s: %s", namespace, w))
				}
			}
			if again && previous != w.PodUID && w.Received.Sub(at) < turnaround {
				v.twoOwners = append(v.twoOwners, fmt.Sprintf("two pods by turns in %s: %s", namespace, w))
			}
			if end := w.End(); end.After(at) {
				last[w.PodUID] = end
			}
			previous = w.PodUID
		}
	}
	return v
}
