package limit

import (
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/keep"
)

// Store keeps the counts of one pod's rules. It is safe for concurrent use.
type Store struct {
	keep.Store[*state, saved]
}

// NewStore returns an empty Store.
func NewStore() *Store { return &Store{} }

// States returns the states of the rules in force, sorted by key.
func (s *Store) States() (out []*meshv1.RuleState) {
	for _, of := range s.InForce() {
		out = append(out, of.report())
	}
	return out
}

// saved is the state of a rule that a process passes to its successor. Durations are in
// nanoseconds.
type saved struct {
	Passed  uint64 `json:"passed,omitempty"`
	Refused uint64 `json:"refused,omitempty"`
	Recover string `json:"recover,omitempty"`
	Failed  uint64 `json:"failed,omitempty"`
	Wait    int64  `json:"wait,omitempty"` // how long the backoff lasts
	savedRate
	savedCircuit
}

type savedRate struct {
	Shared bool   `json:"shared,omitempty"`
	Index  uint64 `json:"index,omitempty"`
	Of     uint64 `json:"of,omitempty"`

	Tokens uint64 `json:"tokens,omitempty"`
	Frac   uint64 `json:"frac,omitempty"`
	// Spent is the last turn that was used, SpentAgo how long ago.
	Spent    uint64 `json:"spent,omitempty"`
	SpentAgo int64  `json:"spentAgo,omitempty"` // 0: never
	Quiet    int64  `json:"quiet,omitempty"`    // how long until turns begin
}

type savedCircuit struct {
	Breaker  int32    `json:"breaker,omitempty"`
	Since    int64    `json:"since,omitempty"` // how long ago; 0: always
	Window   []counts `json:"window,omitempty"`
	WindowIn int64    `json:"windowIn,omitempty"` // how far into the newest part
}

// Possible implements keep.Saved.
func (s saved) Possible() bool {
	if max(s.Passed, s.Refused, s.Tokens, s.Failed) > keep.MaxCount {
		return false
	}
	for _, n := range []int64{s.SpentAgo, s.Quiet, s.Wait, s.Since, s.WindowIn} {
		if n < 0 {
			return false
		}
	}
	for _, c := range s.Window {
		if max(c.Ended, c.Failed, c.Timed, c.Slow) > keep.MaxCount/parts {
			return false
		}
	}
	return len(s.Window) <= parts && meshv1.BreakerState_name[s.Breaker] != "" &&
		(!s.Shared || s.Of == 0 || s.Index < s.Of) && s.Of <= 1<<32
}

// Like implements keep.State.
func (s *state) Like(other *state) bool { return s.config == other.config }

// Save implements keep.State.
func (s *state) Save(now time.Time) saved {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := saved{
		Passed: s.totals.earlierPassed + s.totals.passed, Refused: s.totals.earlierRefused + s.totals.refused,
		Recover: s.recover, Failed: s.backoff.failed, Wait: int64(left(s.backoff.until, now)),
		savedRate:    savedRate{Shared: s.share.shared, Index: s.share.index, Of: s.share.of},
		savedCircuit: savedCircuit{Breaker: int32(s.circuit.breaker), Since: ago(s.circuit.since, now)},
	}
	if s.config.interval > 0 {
		s.rate.bucket.advance(now)
		out.Tokens, out.Frac = s.rate.bucket.tokens, s.rate.bucket.frac
	}
	out.Spent, out.SpentAgo = s.rate.turns.spent, ago(s.rate.turns.at, now)
	if s.rate.inTurns {
		out.Quiet = int64(left(s.rate.turns.from, now))
	}
	out.Window, out.WindowIn = s.outcomes(now)
	return out
}

// outcomes returns the windows of both processes as one, and how far now is into the
// newest part, in nanoseconds.
func (s *state) outcomes(now time.Time) (all []counts, in int64) {
	w := s.circuit.window
	if w.begin.IsZero() {
		w = s.circuit.earlier
	}
	if w.begin.IsZero() {
		return nil, 0
	}
	w.advance(now)
	if !s.circuit.window.begin.IsZero() && !s.circuit.earlier.begin.IsZero() {
		s.circuit.earlier.advance(now)
		for i, c := range s.circuit.earlier.counts {
			w.counts[i] = w.counts[i].plus(c)
		}
	}
	last := parts
	for last > 0 && w.counts[last-1] == (counts{}) {
		last--
	}
	return slices.Clone(w.counts[:last]), int64(max(now.Sub(w.begin), 0))
}

// ago returns how long before now t was, in nanoseconds and at least 1. It returns 0 for
// the zero time.
func ago(t, now time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return int64(max(now.Sub(t), 1))
}

func left(t, now time.Time) time.Duration {
	if t.IsZero() {
		return 0
	}
	return max(t.Sub(now), 0)
}

// Restore implements keep.State.
func (s *state) Restore(was saved, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.totals.earlierPassed, s.totals.earlierRefused = was.Passed, was.Refused
	now, nextRecover := s.share, s.recover
	s.recover = was.Recover
	if s.config.interval > 0 {
		s.restoreBucket(was, at, now)
	}
	if was.Failed > s.backoff.failed {
		s.backoff.failed, s.backoff.failedAt = was.Failed, at
		if was.Wait > 0 {
			s.backoff.until = at.Add(time.Duration(was.Wait))
		}
	}
	s.restoreBreaker(was, at)
	if s.recover != nextRecover {
		s.recover = nextRecover
		if s.circuit.breaker != closed {
			s.turnTo(closed, at)
		}
	}
}

func (s *state) restoreBucket(was saved, at time.Time, now share) {
	old := share{was.Shared, was.Index, was.Of}
	b, t, inTurns := s.config.divide(old)
	if was.Frac < b.interval && was.Tokens < b.burst {
		b.frac = was.Frac
	}
	b.tokens, b.last = min(was.Tokens, b.burst), at
	t.spent = was.Spent
	if was.SpentAgo > 0 {
		t.at = at.Add(-time.Duration(was.SpentAgo))
	}
	if was.Quiet > 0 {
		t.from = at.Add(time.Duration(was.Quiet))
	}
	if s.rate.inTurns && s.rate.turns.at.After(t.at) {
		t.spent, t.at = s.rate.turns.spent, s.rate.turns.at
	}
	s.rate.bucket, s.rate.turns, s.rate.inTurns, s.share = b, t, inTurns, old
	if old != now {
		s.reshare(at, now)
	}
	s.rate.bucket.tokens -= min(s.rate.taken, s.rate.bucket.tokens)
}

// restoreBreaker restores the breaker, unless it has changed in this process since.
func (s *state) restoreBreaker(was saved, at time.Time) {
	var since time.Time
	if was.Since > 0 {
		since = at.Add(-time.Duration(was.Since))
	}
	if !s.circuit.changed.IsZero() && (s.circuit.breaker != closed || !since.After(s.circuit.changed)) {
		return
	}
	s.circuit.breaker, s.circuit.since = meshv1.BreakerState(was.Breaker), since
	if s.circuit.breaker == halfOpen {
		// The probe is served by the other process, so its outcome never arrives here.
		s.circuit.breaker = opened
	}
	s.circuit.earlier.reset()
	if s.circuit.earlier.part == 0 || s.circuit.breaker != closed || len(was.Window) == 0 {
		return
	}
	s.circuit.earlier.begin = at.Add(-min(time.Duration(was.WindowIn), s.circuit.earlier.part))
	copy(s.circuit.earlier.counts[:], was.Window)
}
