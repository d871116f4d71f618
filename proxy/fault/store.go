package fault

import (
	"sync/atomic"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/keep"
)

// Store is what the rules of one pod have decided so far. It is safe for concurrent use.
type Store struct {
	keep.Store[*counts, saved]
	pod string // its uid
}

// NewStore is of the pod with a uid, whose rules have decided nothing.
func NewStore(pod string) *Store { return &Store{pod: pod} }

// States are of the rules in force, sorted by key.
func (s *Store) States() (out []*meshv1.FaultState) {
	for key, c := range s.InForce() {
		out = append(out, &meshv1.FaultState{Key: key, Matched: c.matched.Load(), Injected: c.injected.Load()})
	}
	return out
}

// counts are of one rule: its own, and those of the agent before.
type counts struct {
	matched, injected atomic.Uint64
	earlier           saved // what of them was imported; the store's lock
}

// take takes one of most, of any number if that is 0.
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

// saved is what an agent tells the next of one rule.
type saved struct {
	Matched  uint64 `json:"matched"`
	Injected uint64 `json:"injected"`
}

// Possible implements keep.Saved.
func (s saved) Possible() bool { return max(s.Matched, s.Injected) <= keep.MaxCount }

// Like implements keep.State: a key is of all that a rule says.
func (c *counts) Like(*counts) bool { return true }

// Save implements keep.State.
func (c *counts) Save(time.Time) saved { return saved{c.matched.Load(), c.injected.Load()} }

// Restore implements keep.State. Others may count meanwhile, or take back what they
// counted.
func (c *counts) Restore(was saved, _ time.Time) {
	c.matched.Add(was.Matched - c.earlier.Matched)
	c.injected.Add(was.Injected - c.earlier.Injected)
	c.earlier = was
}
