package fault

import (
	"sync/atomic"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/keep"
)

// Store keeps the counts of one pod's rules. It is safe for concurrent use.
type Store struct {
	keep.Store[*counts, saved]
	pod string // its uid
}

// NewStore returns an empty Store. pod is the uid of the pod.
func NewStore(pod string) *Store { return &Store{pod: pod} }

// States returns the counts of the rules in force, sorted by key.
func (s *Store) States() (out []*meshv1.FaultState) {
	for key, c := range s.InForce() {
		out = append(out, &meshv1.FaultState{Key: key, Matched: c.matched.Load(), Injected: c.injected.Load()})
	}
	return out
}

// counts are the counts of one rule, with those of the previous agent.
type counts struct {
	matched, injected atomic.Uint64
	earlier           saved // the part that was imported; guarded by the store's lock
}

// take counts one injection, and reports whether it is among the first most ones. If
// most is 0, there is no maximum.
func (c *counts) take(most uint64) bool {
	for {
		n := c.injected.Load()
		if most > 0 && n >= most {
			return false
		}
		if c.injected.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// saved is the state of one rule that an agent passes to its successor.
type saved struct {
	Matched  uint64 `json:"matched"`
	Injected uint64 `json:"injected"`
}

// Possible implements keep.Saved.
func (s saved) Possible() bool { return max(s.Matched, s.Injected) <= keep.MaxCount }

// Like implements keep.State. It is always true, because a key covers the whole rule.
func (c *counts) Like(*counts) bool { return true }

// Save implements keep.State.
func (c *counts) Save(time.Time) saved { return saved{c.matched.Load(), c.injected.Load()} }

// Restore implements keep.State. The counts may change concurrently in both directions.
func (c *counts) Restore(was saved, _ time.Time) {
	c.matched.Add(was.Matched - c.earlier.Matched)
	c.injected.Add(was.Injected - c.earlier.Injected)
	c.earlier = was
}
