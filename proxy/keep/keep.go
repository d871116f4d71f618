// Package keep stores what a pod's rules have counted, by the rules' keys, so that it
// survives policies that do not change a rule, and the agent. It is pure except for locks:
// the caller passes the time.
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

	"k8s.io/apimachinery/pkg/util/sets"
)

const (
	// For is how long a state is kept whose rule is not in force. A rule may disappear for
	// a moment, as all do while the pod is refused.
	For = 10 * time.Minute
	// maxLeft bounds the states of rules that are not in force. The oldest are forgotten.
	maxLeft = 1024
	// MaxRules bounds the rules of a policy, and of an export.
	MaxRules = 4096
	maxKey   = 1 << 10
	// MaxExport bounds an export, in bytes: a takeover message of 8 MiB contains two.
	MaxExport = 4<<20 - 64
	// envelope bounds the bytes of an export that are not states.
	envelope = 64
	// MaxCount bounds any count that is imported, so that sums of a few do not overflow.
	MaxCount = 1 << 60
	// version of exports. In version 1, which limits alone used, counts were beside keys;
	// the exports of faults had no version and were counts by key. New data get a field
	// that earlier versions ignore, so that they can still read the rest.
	version = 2
)

// State is what a rule S has counted. It has a lock of its own.
type State[S, E any] interface {
	// Like reports whether the state may replace another.
	Like(S) bool
	// Save returns what the next process needs.
	Save(now time.Time) E
	// Restore adds what the previous process saved to what was counted here. It replaces
	// what was restored earlier.
	Restore(was E, at time.Time)
}

// Saved is a State as JSON.
type Saved interface {
	// Possible reports whether a state is valid; it came from outside.
	Possible() bool
}

// Store has the states of one pod's rules. It is safe for concurrent use. The zero Store
// is empty.
type Store[S State[S, E], E Saved] struct {
	mu    sync.Mutex // taken on policy changes, not by requests
	force map[string]S
	left  map[string]dated[S] // when they were in force last
	// imported has the states of keys that were not in force since.
	imported map[string]dated[E]
}

type dated[T any] struct {
	of   T
	at   time.Time     // when the state was current
	away time.Duration // how long its rule was not in force before
}

// over reports whether the state has expired.
func (d dated[T]) over(now time.Time) bool { return now.Sub(d.at.Add(-d.away)) >= For }

// Add adds the state of a rule's key to those of a policy: the known one, or else fresh,
// which the store takes once the policy is in force.
func (s *Store[S, E]) Add(policy map[string]S, key string, fresh S, now time.Time) (S, error) {
	_, twice := policy[key]
	switch {
	case key == "" || len(key) > maxKey || twice:
		return fresh, fmt.Errorf("key %.40q is used twice, too long, or empty", key)
	case len(policy) == MaxRules:
		return fresh, fmt.Errorf("more than %d rules", MaxRules)
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

// Enforce puts the states of a policy in force. The store takes the map.
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

// InForce returns the states in force, sorted by key.
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

// export is what one process passes to the next. Durations are in nanoseconds: the
// processes share only the wall clock.
type export[S any] struct {
	Version int `json:"version"`
	// Oldest is the oldest version that can read it; 0: any.
	Oldest int   `json:"oldest,omitempty"`
	Wall   int64 `json:"wall"` // Unix
	States []S   `json:"states"`
}

type saved[E Saved] struct {
	Key string `json:"key"`
	Age int64  `json:"age,omitempty"` // how long before Wall the state was current
	// Away is how long its rule was not in force before.
	Away int64 `json:"away,omitempty"`
	Of   E     `json:"of"`
}

// Export returns all states, for Import by the next agent. If there are too many, it omits
// those not in force first.
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

// saved returns all states, those in force first. The caller must hold the lock.
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

// Import replaces what an earlier Import said by what the previous process exported; empty
// data mean that it counted nothing. It adds what the store has counted itself: both may
// have served the pod together. Another version may have exported the data. Import omits
// rules that it cannot read, and names them in the error. If it can read nothing, it
// changes nothing.
func (s *Store[S, E]) Import(data []byte, now time.Time) error {
	in, err := parse[E](data)
	if in == nil {
		return err
	}
	// Time that passed looks like a clock that was set, unless that was set back.
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

// parse reads an export. It returns nil with a reason if it cannot, else the rules that it
// omits.
func parse[E Saved](data []byte) (*export[saved[E]], error) {
	if len(data) == 0 {
		return &export[saved[E]]{}, nil
	}
	if len(data) > MaxExport {
		return nil, fmt.Errorf("export is larger than %d bytes", MaxExport)
	}
	var in export[json.RawMessage]
	if err := json.Unmarshal(data, &in); err != nil {
		return nil, err
	}
	if in.Version == 0 {
		return parseUnversioned[E](data)
	}
	if in.Oldest > version {
		return nil, fmt.Errorf("export of version %d needs version %d to read it, and this is version %d", in.Version, in.Oldest, version)
	}
	if in.Wall < 0 {
		return nil, errors.New("export from before 1970: check the clock of the node")
	}
	out := reading[E]{wall: in.Wall, keys: sets.New[string]()}
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

// parseUnversioned reads an export of fault rules from before there were versions.
func parseUnversioned[E Saved](data []byte) (*export[saved[E]], error) {
	var in map[string]E
	if err := json.Unmarshal(data, &in); err != nil {
		return nil, fmt.Errorf("export without a version: %w", err)
	}
	out := reading[E]{wall: math.MaxInt64, keys: sets.New[string]()} // its states are current
	for key, of := range sorted(in) {
		was := saved[E]{Key: key, Of: of}
		out.add(was, was.check())
	}
	return out.result()
}

func (was saved[E]) check() error {
	if was.Key == "" || len(was.Key) > maxKey {
		return errors.New("the key of a rule is empty or too long")
	}
	if was.Age < 0 || was.Away < 0 || !was.Of.Possible() {
		return fmt.Errorf("rule %q has invalid counts", was.Key)
	}
	return nil
}

// reading is the part of an export that was read, and why the rest was not.
type reading[E Saved] struct {
	wall    int64
	states  []saved[E]
	keys    sets.Set[string]
	leftOut int
	why     error // the first was
}

func (r *reading[E]) add(was saved[E], err error) {
	switch {
	case err != nil:
	case r.keys.Has(was.Key):
		err = fmt.Errorf("key %.40q is used twice", was.Key)
	case len(r.states) == MaxRules:
		err = fmt.Errorf("more than %d rules", MaxRules)
	default:
		r.keys.Insert(was.Key)
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
		err = fmt.Errorf("%d rules omitted, the first because: %w", r.leftOut, r.why)
	}
	return &export[saved[E]]{Wall: r.wall, States: r.states}, err
}
