package limit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Store is what the rules of one pod have counted. It is safe for concurrent use.
type Store struct {
	mu sync.Mutex // of what changes with policies; requests do not take it
	// In force.
	states map[string]*state
	named  []*rule
	// Not in force for less than keepFor: a rule may leave for a moment, as all do
	// while the pod is refused.
	left map[string]leftState
	// What was imported of keys that were not in force since, as long as left.
	imported map[string]importedState
}

type importedState struct {
	saved
	at time.Time // by this process's clock, when it was true
}

type leftState struct {
	*state
	at time.Time
}

const (
	keepFor = 10 * time.Minute
	// maxLeft bounds the states that are kept; of more the oldest are forgotten.
	maxLeft = 1024
)

// NewStore is of a pod whose rules have counted nothing.
func NewStore() *Store { return &Store{} }

// state is what is known of a rule's key, or as new. It is the store's once it is
// in force.
func (s *Store) state(key string, c config, share share, recover string) *state {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.states[key]; known != nil && known.config == c {
		return known
	}
	if left := s.left[key]; left.state != nil && left.config == c {
		return left.state
	}
	out := newState(key, c, share, recover)
	if was, ok := s.imported[key]; ok {
		out.restore(was.saved, was.at)
	}
	return out
}

func (s *Store) enforce(now time.Time, rules []*rule) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := s.left
	s.left = map[string]leftState{}
	for key, was := range s.states {
		s.left[key] = leftState{was, now}
	}
	for key, was := range left {
		if s.left[key].state == nil && now.Sub(was.at) < keepFor {
			s.left[key] = was
		}
	}
	maps.DeleteFunc(s.imported, func(_ string, was importedState) bool { return now.Sub(was.at) >= keepFor })
	s.states, s.named = make(map[string]*state, len(rules)), rules
	for _, r := range rules {
		key := r.state.key
		if s.left[key].state == nil && left[key].state == r.state {
			r.state.renew(r.share, r.recover) // it was kept too long
		}
		delete(s.left, key)
		delete(s.imported, key)
		s.states[key] = r.state
		r.state.enforce(now, r.share, r.recover)
	}
	if over := len(s.left) - maxLeft; over > 0 {
		oldest := slices.SortedFunc(maps.Keys(s.left), func(a, b string) int {
			return cmp.Or(s.left[a].at.Compare(s.left[b].at), cmp.Compare(a, b))
		})
		for _, key := range oldest[:over] {
			delete(s.left, key)
		}
	}
}

func (s *Store) rules() []*rule {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.named
}

// States are of the rules in force, sorted by key.
func (s *Store) States() []*meshv1.RuleState {
	rules := s.rules()
	out := make([]*meshv1.RuleState, 0, len(rules))
	for _, r := range rules {
		out = append(out, r.state.report())
	}
	slices.SortFunc(out, func(a, b *meshv1.RuleState) int { return cmp.Compare(a.GetKey(), b.GetKey()) })
	return out
}

// Opened are the rules in force whose breakers are not closed.
func (s *Store) Opened() (names []Name) {
	for _, r := range s.rules() {
		if r.state.report().GetState() != closed {
			names = append(names, Name{r.breaker, r.name})
		}
	}
	return names
}

// export is what one process tells the next. Lengths of time are in nanoseconds:
// the processes have none but wall-clock time in common.
type export struct {
	Version int     `json:"version"`
	Wall    int64   `json:"wall"` // Unix
	States  []saved `json:"states"`
}

type saved struct {
	Key     string `json:"key"`
	Age     int64  `json:"age,omitempty"` // how long before Wall it was true
	Passed  uint64 `json:"passed,omitempty"`
	Refused uint64 `json:"refused,omitempty"`

	Shared  bool   `json:"shared,omitempty"`
	Index   uint64 `json:"index,omitempty"`
	Of      uint64 `json:"of,omitempty"`
	Recover string `json:"recover,omitempty"`

	Tokens uint64 `json:"tokens,omitempty"`
	Frac   uint64 `json:"frac,omitempty"`
	// Spent turn, and how long ago.
	Spent    uint64 `json:"spent,omitempty"`
	SpentAgo int64  `json:"spentAgo,omitempty"` // 0: none was
	Quiet    int64  `json:"quiet,omitempty"`    // how long there is no turn

	Failed uint64 `json:"failed,omitempty"`
	Wait   int64  `json:"wait,omitempty"` // how long all is refused for that

	Breaker  int32    `json:"breaker,omitempty"`
	Since    int64    `json:"since,omitempty"` // how long ago; 0: ever
	Window   []counts `json:"window,omitempty"`
	WindowIn int64    `json:"windowIn,omitempty"` // how far into the newest part
}

const (
	exportVersion = 1
	// maxExport bounds an export that is taken, in bytes.
	maxExport = 4 << 20
	maxKey    = 1 << 10
)

// Export is all that a store knows, for the next agent; Import takes it. Wall-clock
// time, for the processes have none other in common. Of more than is taken, those that
// are not in force are left out.
func (s *Store) Export(now time.Time) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := export{Version: exportVersion, Wall: now.UnixNano(), States: make([]saved, 0, len(s.named)+len(s.left)+len(s.imported))}
	for _, r := range s.named {
		out.States = append(out.States, r.state.save(now))
	}
	for _, was := range s.left {
		out.States = append(out.States, was.save(now))
	}
	for _, was := range s.imported {
		was.Age = ago(was.at, now)
		out.States = append(out.States, was.saved)
	}
	out.States = out.States[:min(len(out.States), maxRules)]
	return json.Marshal(out)
}

// Import takes what the process before knew, in place of what an earlier Import said.
// To it is added what the store has counted itself since it was new: both may have
// served the pod together. On an error the store is as it was.
func (s *Store) Import(data []byte, now time.Time) error {
	in, err := parse(data)
	if err != nil {
		return fmt.Errorf("reading what rules had counted: %w", err)
	}
	// A clock that was set cannot be told from time that passed, unless it was set back.
	at := now.Add(-max(now.Sub(time.Unix(0, in.Wall)), 0))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.imported = make(map[string]importedState, len(in.States))
	for _, was := range in.States {
		at := at.Add(-time.Duration(was.Age))
		if st := s.states[was.Key]; st != nil {
			st.restore(was, at)
		} else if left := s.left[was.Key]; left.state != nil {
			left.restore(was, at)
		} else {
			s.imported[was.Key] = importedState{was, at}
		}
	}
	return nil
}

func parse(data []byte) (in export, err error) {
	if len(data) > maxExport {
		return in, errors.New("it is too long")
	}
	if err = json.Unmarshal(data, &in); err != nil {
		return in, err
	}
	if in.Version != exportVersion {
		return in, fmt.Errorf("version %d is not known", in.Version)
	}
	if len(in.States) > maxRules {
		return in, fmt.Errorf("it is of %d rules, and %d at most are read", len(in.States), maxRules)
	}
	if in.Wall < 0 {
		return in, errors.New("it was written before 1970: look at the clock of the node")
	}
	keys := make(map[string]bool, len(in.States))
	for _, s := range in.States {
		if s.Key == "" || len(s.Key) > maxKey || keys[s.Key] {
			return in, errors.New("a rule in it has no key, one that is too long, or another's")
		}
		if !s.possible() {
			return in, fmt.Errorf("rule %q has counted in it what none can", s.Key)
		}
		keys[s.Key] = true
	}
	return in, nil
}

// most bounds any count, so that sums of a few do not overflow.
const most = 1 << 60

func (s saved) possible() bool {
	for _, n := range []uint64{s.Passed, s.Refused, s.Tokens, s.Frac, s.Spent, s.Failed} {
		if n > most && n != s.Frac {
			return false
		}
	}
	for _, n := range []int64{s.Age, s.SpentAgo, s.Quiet, s.Wait, s.Since, s.WindowIn} {
		if n < 0 {
			return false
		}
	}
	for _, c := range s.Window {
		if max(c.Ended, c.Failed, c.Timed, c.Slow) > most/parts {
			return false
		}
	}
	return len(s.Window) <= parts && meshv1.BreakerState_name[s.Breaker] != "" &&
		(!s.Shared || s.Of == 0 || s.Index < s.Of) && s.Of <= 1<<32
}

func (s *state) save(now time.Time) saved {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := saved{
		Key: s.key, Passed: s.earlierPassed + s.passed, Refused: s.earlierRefused + s.refused,
		Shared: s.share.shared, Index: s.share.index, Of: s.share.of, Recover: s.recover,
		Failed: s.failed, Breaker: int32(s.breaker),
	}
	if s.interval > 0 {
		s.bucket.advance(now)
		out.Tokens, out.Frac = s.bucket.tokens, s.bucket.frac
	}
	out.Spent, out.SpentAgo = s.turns.spent, ago(s.turns.at, now)
	if s.inTurns {
		out.Quiet = int64(left(s.turns.from, now))
	}
	out.Wait = int64(left(s.until, now))
	out.Since = ago(s.since, now)
	out.Window, out.WindowIn = s.outcomes(now)
	return out
}

// outcomes are those of both processes, and how far into the newest part now is.
func (s *state) outcomes(now time.Time) (all []counts, in int64) {
	w := s.window
	if w.begin.IsZero() {
		w = s.earlier
	}
	if w.begin.IsZero() {
		return nil, 0
	}
	w.advance(now)
	if !s.window.begin.IsZero() && !s.earlier.begin.IsZero() {
		s.earlier.advance(now)
		for i, c := range s.earlier.counts {
			w.counts[i] = w.counts[i].plus(c)
		}
	}
	last := parts
	for last > 0 && w.counts[last-1] == (counts{}) {
		last--
	}
	return slices.Clone(w.counts[:last]), int64(max(now.Sub(w.begin), 0))
}

// ago is at least 1, but for no time at all.
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

// restore makes the state what it was at a time, and what was counted here.
func (s *state) restore(was saved, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.earlierPassed, s.earlierRefused = was.Passed, was.Refused
	now, nextRecover := s.share, s.recover
	s.recover = was.Recover
	if s.interval > 0 {
		s.restoreBucket(was, at, now)
	}
	if was.Failed > s.failed {
		s.failed, s.failedAt = was.Failed, at
		if was.Wait > 0 {
			s.until = at.Add(time.Duration(was.Wait))
		}
	}
	s.restoreBreaker(was, at)
	if s.recover != nextRecover {
		s.recover = nextRecover
		if s.breaker != closed {
			s.turnTo(closed, at)
		}
	}
}

func (s *state) restoreBucket(was saved, at time.Time, now share) {
	old := share{was.Shared, was.Index, was.Of}
	b, t, inTurns := s.divide(old)
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
	if s.inTurns && s.turns.at.After(t.at) {
		t.spent, t.at = s.turns.spent, s.turns.at
	}
	s.bucket, s.turns, s.inTurns, s.share = b, t, inTurns, old
	if old != now {
		s.reshare(at, now)
	}
	s.bucket.tokens -= min(s.taken, s.bucket.tokens)
}

// restoreBreaker makes the breaker what it was, unless it changed here since.
func (s *state) restoreBreaker(was saved, at time.Time) {
	var since time.Time
	if was.Since > 0 {
		since = at.Add(-time.Duration(was.Since))
	}
	if !s.changed.IsZero() && (s.breaker != closed || !since.After(s.changed)) {
		return
	}
	s.breaker, s.since = meshv1.BreakerState(was.Breaker), since
	if s.breaker == halfOpen {
		// Its probe is the other's, which tells nobody.
		s.breaker = opened
	}
	s.earlier.reset()
	if s.earlier.part == 0 || s.breaker != closed || len(was.Window) == 0 {
		return
	}
	s.earlier.begin = at.Add(-min(time.Duration(was.WindowIn), s.earlier.part))
	copy(s.earlier.counts[:], was.Window)
}
