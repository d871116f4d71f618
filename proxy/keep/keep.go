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
	"math"
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
	// version is of exports. 1 was of limits alone and had counts beside keys; faults had
	// no version then, and counts by key. What is added later gets a field that earlier
	// versions do without, so that they still read it.
	version = 2
)

// State is what a rule S has counted. It has a lock of its own.
type State[S, E any] interface {
	// Like reports whether it may go on in the place of another.
	Like(S) bool
	// Save is what to tell the next process.
	Save(now time.Time) E
	// Restore makes it what the process before saved, and what was counted here. That
	// takes the place of what was restored earlier.
	Restore(was E, at time.Time)
}

// Saved is a State as JSON.
type Saved interface {
	// Possible reports whether a state can be so; it came from outside.
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

// over reports whether it is to be forgotten.
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
	Version int `json:"version"`
	// Oldest is the oldest version that may read it; 0: any.
	Oldest int   `json:"oldest,omitempty"`
	Wall   int64 `json:"wall"` // Unix
	States []S   `json:"states"`
}

type saved[E Saved] struct {
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
	out := export[json.RawMessage]{Version: version, Oldest: version, Wall: now.UnixNano()}
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
// since it was new: both may have served the pod together. Other versions may have
// exported it. It leaves out rules that it cannot read; the error says so. If nothing can
// be read, the store is as it was.
func (s *Store[S, E]) Import(data []byte, now time.Time) error {
	in, err := parse[E](data)
	if in == nil {
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
	return err
}

// parse reads an export. Without one it returns why; with one, which rules are left out.
func parse[E Saved](data []byte) (*export[saved[E]], error) {
	if len(data) == 0 {
		return &export[saved[E]]{}, nil
	}
	if len(data) > MaxExport {
		return nil, errors.New("it is too long")
	}
	var in export[json.RawMessage]
	if err := json.Unmarshal(data, &in); err != nil {
		return nil, err
	}
	if in.Version == 0 {
		return parseUnversioned[E](data)
	}
	if in.Oldest > version {
		return nil, fmt.Errorf("it is of version %d, which takes version %d to read, and this is version %d", in.Version, in.Oldest, version)
	}
	if in.Wall < 0 {
		return nil, errors.New("it was written before 1970: look at the clock of the node")
	}
	out := reading[E]{wall: in.Wall}
	for _, state := range in.States {
		out.add(parseState[E](state, in.Version))
	}
	return out.result()
}

func parseState[E Saved](data []byte, of int) (was saved[E], err error) {
	if err := json.Unmarshal(data, &was); err != nil {
		return was, err
	}
	if of == 1 {
		if err := json.Unmarshal(data, &was.Of); err != nil {
			return was, err
		}
	}
	return was, was.check()
}

// parseUnversioned reads what fault rules counted before there were versions.
func parseUnversioned[E Saved](data []byte) (*export[saved[E]], error) {
	var in map[string]E
	if err := json.Unmarshal(data, &in); err != nil {
		return nil, fmt.Errorf("it has no version: %w", err)
	}
	out := reading[E]{wall: math.MaxInt64} // it is as of now
	for key, of := range sorted(in) {
		was := saved[E]{Key: key, Of: of}
		out.add(was, was.check())
	}
	return out.result()
}

func (was saved[E]) check() error {
	if was.Key == "" || len(was.Key) > maxKey {
		return errors.New("a rule has no key, or one that is too long")
	}
	if was.Age < 0 || was.Away < 0 || !was.Of.Possible() {
		return fmt.Errorf("rule %q has counted what none can", was.Key)
	}
	return nil
}

// reading is what of an export was read, and left out.
type reading[E Saved] struct {
	wall    int64
	states  []saved[E]
	keys    map[string]bool
	leftOut int
	why     error // the first was
}

func (r *reading[E]) add(was saved[E], err error) {
	switch {
	case err != nil:
	case r.keys[was.Key]:
		err = fmt.Errorf("key %.40q is another's", was.Key)
	case len(r.states) == MaxRules:
		err = fmt.Errorf("%d rules at most are read", MaxRules)
	default:
		if r.keys == nil {
			r.keys = map[string]bool{}
		}
		r.keys[was.Key] = true
		r.states = append(r.states, was)
		return
	}
	if r.leftOut++; r.why == nil {
		r.why = err
	}
}

func (r *reading[E]) result() (*export[saved[E]], error) {
	var err error
	if r.leftOut > 0 {
		err = fmt.Errorf("rules left out: %d, the first because: %w", r.leftOut, r.why)
	}
	return &export[saved[E]]{Wall: r.wall, States: r.states}, err
}
