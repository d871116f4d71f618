// Package keep holds what a pod's rules have counted, by the rules' keys, so that it
// outlives policies that do not touch a rule, and the agent. It is pure but for locks:
// the time is told to it.
package keep

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"
)

const (
	// For is how long a state is kept whose rule is not in force: it may leave for a
	// moment, as all do while the pod is refused.
	For = 10 * time.Minute
	// maxLeft bounds the states that are kept; of more the oldest are forgotten.
	maxLeft = 1024
	// MaxRules bounds the rules of a policy, and of an export.
	MaxRules = 4096
	maxKey   = 1 << 10
	// MaxExport bounds an export, in bytes: two are handed over in one piece of 8 MiB.
	MaxExport = 4<<20 - 64
	// envelope is what of an export is not states, at most.
	envelope = 64
	// MaxCount bounds any count that is imported, so that sums of a few do not overflow.
	MaxCount = 1 << 60
	// version is of exports; 1 was of limits alone.
	version = 2
)

// State is what a rule S has counted. It has a lock of its own.
type State[S, E any] interface {
	// Like tells whether it may go on in the place of another.
	Like(S) bool
	// Save is what to tell the next process.
	Save(now time.Time) E
	// Restore makes it what the process before saved, and what was counted here. That
	// takes the place of what was restored earlier.
	Restore(was E, at time.Time)
}

// Saved is a State as JSON.
type Saved interface {
	// Possible tells whether a state can be so; it came from outside.
	Possible() bool
}

// Store has the states of one pod's rules. It is safe for concurrent use, and the zero
// Store knows none.
type Store[S State[S, E], E Saved] struct {
	mu    sync.Mutex // of what changes with policies; requests do not take it
	force map[string]S
	left  map[string]dated[S] // when they were in force last
	// What was imported of keys that were not in force since, and when it was true.
	imported map[string]dated[E]
}

type dated[T any] struct {
	of   T
	at   time.Time
	away time.Duration // how long its rule was not in force by then
}

// over tells whether it is to be forgotten.
func (d dated[T]) over(now time.Time) bool { return now.Sub(d.at.Add(-d.away)) >= For }

// Add adds the state of a rule's key to those of a policy: the one that is known, or
// else fresh, which is the store's once it is in force.
func (s *Store[S, E]) Add(policy map[string]S, key string, fresh S, now time.Time) (S, error) {
	_, twice := policy[key]
	switch {
	case key == "" || len(key) > maxKey || twice:
		return fresh, fmt.Errorf("key %.40q is another's, too long, or none", key)
	case len(policy) == MaxRules:
		return fresh, fmt.Errorf("there are more than %d", MaxRules)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if known, ok := s.known(key, now); ok && known.Like(fresh) {
		fresh = known
	}
	policy[key] = fresh
	return fresh, nil
}

func (s *Store[S, E]) known(key string, now time.Time) (S, bool) {
	if state, ok := s.force[key]; ok {
		return state, true
	}
	left, ok := s.left[key]
	return left.of, ok && !left.over(now)
}

// Enforce makes the states of a policy those in force. The map is the store's then.
func (s *Store[S, E]) Enforce(now time.Time, policy map[string]S) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := make(map[string]dated[S], len(s.left))
	maps.Copy(left, s.left)
	for key, state := range s.force {
		left[key] = dated[S]{of: state, at: now}
	}
	maps.DeleteFunc(left, func(key string, was dated[S]) bool {
		_, in := policy[key]
		return in || was.over(now)
	})
	oldest := slices.SortedFunc(maps.Keys(left), func(a, b string) int {
		return cmp.Or(left[a].at.Compare(left[b].at), cmp.Compare(a, b))
	})
	for _, key := range oldest[:max(len(oldest)-maxLeft, 0)] {
		delete(left, key)
	}
	for key, was := range s.imported {
		switch state, in := policy[key]; {
		case was.over(now):
		case !in:
			continue
		default:
			state.Restore(was.of, was.at)
		}
		delete(s.imported, key)
	}
	s.force, s.left = policy, left
}

// InForce are the states in force, sorted by key.
func (s *Store[S, E]) InForce() iter.Seq2[string, S] {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sorted(s.force)
}

func sorted[T any](m map[string]T) iter.Seq2[string, T] {
	return func(yield func(string, T) bool) {
		for _, key := range slices.Sorted(maps.Keys(m)) {
			if !yield(key, m[key]) {
				return
			}
		}
	}
}

// export is what one process tells the next. Lengths of time are in nanoseconds: the
// processes have none but wall-clock time in common.
type export[S any] struct {
	Version int   `json:"version"`
	Wall    int64 `json:"wall"` // Unix
	States  []S   `json:"states"`
}

type saved[E any] struct {
	Key string `json:"key"`
	Age int64  `json:"age,omitempty"` // how long before Wall it was true
	// Away is how long its rule was not in force by then.
	Away int64 `json:"away,omitempty"`
	Of   E     `json:"of"`
}

// Export is all that a store knows, for the next agent; Import takes it. Of more than is
// taken, those that are not in force are left out first.
func (s *Store[S, E]) Export(now time.Time) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := export[json.RawMessage]{Version: version, Wall: now.UnixNano()}
	room := MaxExport - envelope
	for state := range s.saved(now) {
		data, err := json.Marshal(state)
		if err != nil {
			return nil, err
		}
		if room -= len(data) + len(","); room < 0 || len(out.States) == MaxRules {
			break
		}
		out.States = append(out.States, data)
	}
	return json.Marshal(out)
}

// saved are all states, those in force first. The lock is held.
func (s *Store[S, E]) saved(now time.Time) iter.Seq[saved[E]] {
	return func(yield func(saved[E]) bool) {
		for key, state := range sorted(s.force) {
			if !yield(saved[E]{Key: key, Of: state.Save(now)}) {
				return
			}
		}
		for key, was := range sorted(s.left) {
			if !was.over(now) && !yield(saved[E]{Key: key, Away: since(was.at, now), Of: was.of.Save(now)}) {
				return
			}
		}
		for key, was := range sorted(s.imported) {
			if !was.over(now) && !yield(saved[E]{key, since(was.at, now), int64(was.away), was.of}) {
				return
			}
		}
	}
}

func since(t, now time.Time) int64 { return int64(max(now.Sub(t), 0)) }

// Import takes what the process before knew, in place of what an earlier Import said; no
// data is of one that knew nothing. To it is added what the store has counted itself
// since it was new: both may have served the pod together. On an error the store is as it
// was.
func (s *Store[S, E]) Import(data []byte, now time.Time) error {
	in, err := parse[E](data)
	if err != nil {
		return err
	}
	// A clock that was set cannot be told from time that passed, unless it was set back.
	wall := now.Add(-max(now.Sub(time.Unix(0, in.Wall)), 0))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.imported = make(map[string]dated[E], len(in.States))
	for _, was := range in.States {
		at := wall.Add(-time.Duration(was.Age))
		if state, ok := s.known(was.Key, now); ok {
			state.Restore(was.Of, at)
		} else {
			s.imported[was.Key] = dated[E]{was.Of, at, time.Duration(was.Away)}
		}
	}
	return nil
}

func parse[E Saved](data []byte) (in export[saved[E]], err error) {
	if len(data) == 0 {
		return in, nil
	}
	if len(data) > MaxExport {
		return in, errors.New("it is too long")
	}
	if err = json.Unmarshal(data, &in); err != nil {
		return in, err
	}
	if in.Version != version {
		return in, fmt.Errorf("version %d is not known", in.Version)
	}
	if len(in.States) > MaxRules {
		return in, fmt.Errorf("it is of %d rules, and %d at most are read", len(in.States), MaxRules)
	}
	if in.Wall < 0 {
		return in, errors.New("it was written before 1970: look at the clock of the node")
	}
	keys := make(map[string]bool, len(in.States))
	for _, was := range in.States {
		if was.Key == "" || len(was.Key) > maxKey || keys[was.Key] {
			return in, errors.New("a rule in it has no key, one that is too long, or another's")
		}
		if was.Age < 0 || was.Away < 0 || !was.Of.Possible() {
			return in, fmt.Errorf("rule %q has counted in it what none can", was.Key)
		}
		keys[was.Key] = true
	}
	return in, nil
}
