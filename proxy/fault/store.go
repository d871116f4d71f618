package fault

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Bounds of what is imported.
const (
	maxExport = 8 << 20
	maxRules  = 1 << 14
	maxKey    = 1 << 10
	most      = 1 << 60 // of any count
)

// Store is what the rules of one pod have decided so far. It is safe for concurrent use.
type Store struct {
	pod string // its uid

	mu    sync.Mutex
	known map[string]*counts // by key
	// force are the keys of the rules in force, sorted.
	force []string
	// left is since when others of known are not in force. They are kept for a while: a
	// rule may leave for a moment, as all do while the pod is refused.
	left map[string]time.Time
}

const (
	keepFor = 10 * time.Minute
	// maxLeft bounds the rules that are kept; of more the oldest are forgotten.
	maxLeft = 1024
)

// enforce makes these keys those in force.
func (s *Store) enforce(now time.Time, counts map[string]*counts) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := map[string]time.Time{}
	for key, c := range s.known {
		at, away := s.left[key]
		if !away {
			at = now
		}
		over := away && now.Sub(at) >= keepFor
		switch in := counts[key]; {
		case in == nil && !over:
			left[key] = at
		case in == c && over: // kept too long
			c.matched.Store(0)
			c.injected.Store(0)
		}
	}
	if over := len(left) - maxLeft; over > 0 {
		oldest := slices.SortedFunc(maps.Keys(left), func(a, b string) int {
			return cmp.Or(left[a].Compare(left[b]), cmp.Compare(a, b))
		})
		for _, key := range oldest[:over] {
			delete(left, key)
		}
	}
	known := maps.Clone(counts)
	for key := range left {
		known[key] = s.known[key]
	}
	s.known, s.left, s.force = known, left, slices.Sorted(maps.Keys(counts))
}

// counts are of one rule: its own, and those of the agent before.
type counts struct {
	matched, injected atomic.Uint64
	earlier           exported // what of them was imported; the store's lock
}

// carry puts what was imported in place of what was before. What is counted here
// stays, and whoever counts meanwhile, or takes back what he counted.
func (c *counts) carry(of exported) {
	c.matched.Add(of.Matched - c.earlier.Matched)
	c.injected.Add(of.Injected - c.earlier.Injected)
	c.earlier = of
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

// NewStore is of the pod with a uid, whose rules have decided nothing.
func NewStore(pod string) *Store { return &Store{pod: pod, known: map[string]*counts{}} }

// of returns the counts of a key.
func (s *Store) of(key string) *counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.known[key]
	if c == nil {
		c = &counts{}
		s.known[key] = c
	}
	return c
}

// States are of the rules in force, sorted by key.
func (s *Store) States() []*meshv1.FaultState {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*meshv1.FaultState
	for _, key := range s.force {
		if c := s.known[key]; c != nil {
			out = append(out, &meshv1.FaultState{Key: key, Matched: c.matched.Load(), Injected: c.injected.Load()})
		}
	}
	return out
}

// exported is what an agent tells the next of one rule.
type exported struct {
	Matched  uint64 `json:"matched"`
	Injected uint64 `json:"injected"`
}

// Export is all that a store knows, for the next agent; Import takes it.
func (s *Store) Export() ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[string]exported, len(s.known))
	for key, c := range s.known {
		out[key] = exported{c.matched.Load(), c.injected.Load()}
	}
	return json.Marshal(out)
}

// Import takes what the process before counted, in place of what an earlier Import said.
// To it is added what the store has counted itself: both may have served the pod
// together. On an error the store is as it was.
func (s *Store) Import(data []byte) error {
	read, err := parse(data)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.known, func(key string, c *counts) bool {
		c.carry(read[key])
		_, now := read[key]
		_, found := slices.BinarySearch(s.force, key)
		return !now && !found && c.matched.Load() == 0
	})
	for key, of := range read {
		if s.known[key] == nil {
			c := &counts{}
			c.carry(of)
			s.known[key] = c
		}
	}
	return nil
}

func parse(data []byte) (out map[string]exported, err error) {
	switch {
	case len(data) == 0: // of an agent that knew nothing
		return nil, nil
	case len(data) > maxExport:
		return nil, errors.New("what fault rules counted is too large to be read")
	}
	if err := json.Unmarshal(data, &out); err != nil {
		return nil, fmt.Errorf("read what fault rules counted: %w", err)
	}
	if len(out) > maxRules {
		return nil, fmt.Errorf("what fault rules counted is of %d rules, and %d at most are read", len(out), maxRules)
	}
	for key, of := range out {
		if len(key) > maxKey {
			return nil, errors.New("read what fault rules counted: a key is too long")
		}
		if max(of.Matched, of.Injected) > most {
			return nil, errors.New("read what fault rules counted: it has a count that cannot be")
		}
	}
	return out, nil
}
