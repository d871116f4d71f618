package limit

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// config are the parameters of a rule that its counting depends on.
type config struct {
	burst, limit, interval uint64 // interval 0: no bucket
	maxInFlight            uint64 // 0: any number
	failures               uint64 // 0: no backoff
	base, most             time.Duration
	trigger                meshv1.Trigger
	period                 time.Duration // of outcomes that count; 0: no trip
	minRequests            uint64
	errorPercent           float64
	slowPercent            float64
	slow                   time.Duration
	sleep                  time.Duration // sleeping window; 0: recovered by the annotation
}

// forced reports whether the trigger decides alone, regardless of the counts.
func (c config) forced() bool {
	return c.trigger == meshv1.Trigger_TRIGGER_FORCE_OPENED || c.trigger == meshv1.Trigger_TRIGGER_FORCE_CLOSED
}

func newConfig(m *meshv1.LimitRule) (config, error) {
	c := config{maxInFlight: uint64(m.GetMaxInFlight()), trigger: m.GetTrigger()}
	if b := m.GetBucket(); b != nil {
		if b.GetBurst() == 0 || b.GetIntervalNs() <= 0 {
			return c, fmt.Errorf("invalid bucket: burst %d, interval %d ns", b.GetBurst(), b.GetIntervalNs())
		}
		c.burst, c.limit, c.interval = uint64(b.GetBurst()), uint64(b.GetLimit()), uint64(b.GetIntervalNs())
	}
	if b := m.GetBackoff(); b != nil {
		if b.GetBaseNs() <= 0 || b.GetMaxNs() <= 0 {
			return c, fmt.Errorf("invalid backoff: base %d ns, maximum %d ns", b.GetBaseNs(), b.GetMaxNs())
		}
		c.failures, c.base, c.most = max(uint64(b.GetFailures()), 1), time.Duration(b.GetBaseNs()), time.Duration(b.GetMaxNs())
	}
	if t := m.GetTrip(); t != nil {
		if t.GetWindowNs() <= 0 || !percent(t.GetErrorPercent()) || !percent(t.GetSlowPercent()) || t.GetSlowNs() < 0 {
			return c, fmt.Errorf("invalid trip: %v%% failed or %v%% longer than %d ns, in a window of %d ns",
				t.GetErrorPercent(), t.GetSlowPercent(), t.GetSlowNs(), t.GetWindowNs())
		}
		c.period, c.minRequests = time.Duration(t.GetWindowNs()), max(uint64(t.GetMinRequests()), 1)
		c.errorPercent, c.slowPercent, c.slow = t.GetErrorPercent(), t.GetSlowPercent(), time.Duration(t.GetSlowNs())
	}
	if r := m.GetRecovery(); r != nil {
		if r.GetSleepingWindowNs() <= 0 {
			return c, fmt.Errorf("invalid sleeping window of %d ns", r.GetSleepingWindowNs())
		}
		c.sleep = time.Duration(r.GetSleepingWindowNs())
	}
	switch c.trigger {
	case meshv1.Trigger_TRIGGER_NORMAL, meshv1.Trigger_TRIGGER_LIMITER_ONLY,
		meshv1.Trigger_TRIGGER_FORCE_OPENED, meshv1.Trigger_TRIGGER_FORCE_CLOSED:
		return c, nil
	}
	return c, fmt.Errorf("unknown trigger %v", c.trigger)
}

func percent(p float64) bool { return p >= 0 && p <= 100 } // false for NaN

// share is a pod's part of a rule.
type share struct {
	shared    bool
	index, of uint64
}

func newShare(m *meshv1.Share) (share, error) {
	if m == nil {
		return share{}, nil
	}
	s := share{true, uint64(m.GetIndex()), uint64(m.GetOf())}
	if s.of > 0 && s.index >= s.of {
		return s, fmt.Errorf("invalid share %d of %d", s.index, s.of)
	}
	return s, nil
}

// part returns the pod's part of n.
func (s share) part(n uint64) uint64 {
	switch {
	case !s.shared:
		return n
	case s.of == 0:
		return 0
	case s.index < n%s.of:
		return n/s.of + 1
	}
	return n / s.of
}

const (
	closed   = meshv1.BreakerState_BREAKER_CLOSED
	opened   = meshv1.BreakerState_BREAKER_OPENED
	halfOpen = meshv1.BreakerState_BREAKER_HALF_OPEN
)

// state is the counts of one rule.
type state struct {
	config config
	key    string
	id     uint64 // states are locked in the order of their ids

	mu       sync.Mutex
	share    share
	recover  string
	inFlight uint64
	rate     rate
	backoff  backoff
	circuit  circuit
	totals   totals
}

// rate is a pod's part of a rule's bucket.
type rate struct {
	bucket  bucket
	turns   turns
	inTurns bool
	taken   uint64 // tokens
}

// backoff refuses requests after consecutive failures.
type backoff struct {
	failed   uint64    // in a row
	failedAt time.Time // when the last failure was counted
	until    time.Time // all requests are refused until then
}

// circuit is a breaker and the outcomes that open it.
type circuit struct {
	breaker meshv1.BreakerState
	since   time.Time // zero: always
	probe   uint64    // number of the last probe
	probing bool      // the last probe is under way
	probed  time.Time // when the last probe began
	changed time.Time // last change of the breaker in this process; zero: never
	window  window
	earlier window // of the previous process
}

// totals are the numbers of requests, in this process and in the previous one.
type totals struct{ passed, refused, earlierPassed, earlierRefused uint64 }

var lastID atomic.Uint64

func newState(key string, c config, s share, recover string) *state {
	out := &state{config: c, key: key, id: lastID.Add(1), share: s, recover: recover}
	if c.interval > 0 {
		out.rate.bucket, out.rate.turns, out.rate.inTurns = c.divide(s)
	}
	if c.period > 0 {
		out.circuit.window, out.circuit.earlier = newWindow(c.period), newWindow(c.period)
	}
	return out
}

// divide returns the pod's share of the bucket: a smaller bucket, or turns.
func (c config) divide(s share) (b bucket, t turns, inTurns bool) {
	if !s.shared || s.of == 0 {
		return newBucket(s.part(c.burst), c.limit, c.interval), t, false
	}
	b = newBucket(s.part(c.burst), c.limit, c.interval)
	if c.limit > 0 && c.burst < s.of {
		return b, newTurns(s.index, s.of, c.burst, c.limit, c.interval), true
	}
	if b.interval = mul(c.interval, s.of); b.interval == math.MaxInt64 {
		b.limit = 0 // the interval overflows: never refilled
	}
	return b, t, false
}

// enforce applies those parts of a rule that may change. A share that grows gets no
// tokens at once: another pod may have spent them.
func (s *state) enforce(now time.Time, next share, recover string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.recover != recover {
		s.recover = recover
		if s.circuit.breaker != closed {
			s.turnTo(closed, now)
		}
	}
	s.reshare(now, next)
}

func (s *state) reshare(now time.Time, next share) {
	before := s.share
	if s.share = next; before == next || s.config.interval == 0 {
		return
	}
	b, t, inTurns := s.config.divide(next)
	if s.rate.inTurns || before.shared && before.of == 0 {
		b.tokens, b.last = 0, now
	} else {
		s.rate.bucket.become(b, now)
		b = s.rate.bucket
	}
	s.rate.bucket, s.rate.turns, s.rate.inTurns = b, t, inTurns
	if inTurns {
		s.rate.turns.from = now.Add(duration(mul(s.config.burst, t.slot)))
	}
}

func (s *state) turnTo(b meshv1.BreakerState, now time.Time) {
	s.circuit.breaker, s.circuit.since, s.circuit.changed, s.circuit.probing = b, now, now, false
	s.circuit.window.reset()
	s.circuit.earlier.reset()
	if b == closed {
		s.backoff.failed, s.backoff.until = 0, time.Time{}
	}
}

// check returns why a request may not pass, or nil. flies means that it counts as in
// flight. The caller must hold the lock.
func (s *state) check(now time.Time, flies bool) *Refusal {
	switch s.config.trigger {
	case meshv1.Trigger_TRIGGER_FORCE_OPENED:
		return &Refusal{Opened: true, Reason: "forced"}
	case meshv1.Trigger_TRIGGER_FORCE_CLOSED:
		return nil
	}
	if r := s.checkBreaker(now); r != nil {
		return r
	}
	if left := s.backoff.until.Sub(now); !s.backoff.until.IsZero() && left > 0 {
		return &Refusal{Reason: "backoff", RetryAfter: left}
	}
	if flies && s.config.maxInFlight > 0 && s.inFlight >= s.places() {
		return &Refusal{Reason: "in_flight", RetryAfter: time.Second}
	}
	return s.checkRate(now)
}

func (s *state) checkBreaker(now time.Time) *Refusal {
	switch {
	case s.circuit.breaker == closed:
	case s.config.sleep == 0:
		return &Refusal{Opened: true, Reason: "opened"}
	case s.circuit.breaker == opened && now.Sub(s.circuit.since) < s.config.sleep:
		return &Refusal{Opened: true, Reason: "opened", RetryAfter: s.config.sleep - max(now.Sub(s.circuit.since), 0)}
	case s.circuit.probing && now.Sub(s.circuit.probed) < s.config.sleep: // a probe that takes longer is abandoned
		return &Refusal{Opened: true, Reason: "opened", RetryAfter: s.config.sleep - max(now.Sub(s.circuit.probed), 0)}
	}
	return nil
}

func (s *state) checkRate(now time.Time) *Refusal {
	switch {
	case s.share.shared && s.share.of == 0:
		return &Refusal{Reason: "bucket", RetryAfter: time.Second}
	case s.config.interval == 0:
		return nil
	case s.rate.inTurns:
		if s.rate.turns.may(now) {
			return nil
		}
		// Waiting for a turn is no sign of too many requests: do not open.
		return &Refusal{Reason: "bucket", RetryAfter: s.rate.turns.wait(now)}
	}
	s.rate.bucket.advance(now)
	if s.rate.bucket.tokens > 0 {
		return nil
	}
	r := &Refusal{Reason: "bucket", RetryAfter: s.rate.bucket.wait()}
	if s.config.trigger == meshv1.Trigger_TRIGGER_NORMAL {
		s.turnTo(opened, now)
		if r.RetryAfter > 0 { // else the bucket is never refilled, and no probe passes
			r.RetryAfter = max(r.RetryAfter, s.config.sleep)
		}
	}
	return r
}

// places returns how many requests may be in flight. If there are more pods than
// places, each pod has one, because there are no turns for requests in flight.
func (s *state) places() uint64 {
	n := s.share.part(s.config.maxInFlight)
	if s.share.of > 0 {
		n = max(n, 1)
	}
	return n
}

// take counts a request that check allowed. The caller must hold the lock.
func (s *state) take(now time.Time, flies bool) claim {
	s.totals.passed++
	h := claim{state: s, flies: flies && s.config.maxInFlight > 0}
	if h.flies {
		s.inFlight++
	}
	if s.config.trigger == meshv1.Trigger_TRIGGER_FORCE_CLOSED {
		return h
	}
	switch {
	case s.rate.inTurns:
		s.rate.turns.take(now)
	case s.config.interval > 0:
		s.rate.bucket.tokens--
		s.rate.taken++
	}
	if s.circuit.breaker != closed {
		if s.circuit.breaker == opened {
			s.turnTo(halfOpen, now)
		}
		s.circuit.probe++
		s.circuit.probing, s.circuit.probed = true, now
		h.probe = s.circuit.probe
	}
	return h
}

// answered records the outcome of a request that began at started.
func (s *state) answered(h claim, started, now time.Time, o Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.config.trigger == meshv1.Trigger_TRIGGER_FORCE_CLOSED {
		return
	}
	slow := s.config.slowPercent > 0 && o.Took > s.config.slow
	unknown := o.Unknown && !slow
	if h.probe != 0 && h.probe == s.circuit.probe && s.circuit.probing && s.circuit.breaker == halfOpen {
		s.conclude(now, unknown, o.Failed || slow)
	}
	if unknown {
		return
	}
	if !o.Unknown {
		s.back(started, now, o.Failed)
	}
	if s.circuit.breaker == closed && h.probe == 0 && !started.Before(s.circuit.since) {
		s.count(now, o, slow)
	}
}

// conclude ends a probe, and closes or opens the breaker unless the outcome is unknown.
func (s *state) conclude(now time.Time, unknown, failed bool) {
	switch {
	case unknown:
		s.circuit.probing = false
	case failed:
		s.turnTo(opened, now)
	default:
		s.turnTo(closed, now)
	}
}

// count adds an outcome to the window, and opens the breaker if too many requests failed
// or were slow.
func (s *state) count(now time.Time, o Outcome, slow bool) {
	if s.circuit.window.part == 0 || s.config.trigger != meshv1.Trigger_TRIGGER_NORMAL {
		return
	}
	c := counts{Ended: 1}
	if o.Failed && !o.Unknown {
		c.Failed = 1
	}
	if o.Took > 0 {
		c.Timed = 1
		if slow {
			c.Slow = 1
		}
	}
	sum := s.circuit.window.add(now, c).plus(s.circuit.earlier.sum(now))
	if s.config.errorPercent > 0 && reached(sum.Failed, sum.Ended, s.config.minRequests, s.config.errorPercent) ||
		s.config.slowPercent > 0 && reached(sum.Slow, sum.Timed, s.config.minRequests, s.config.slowPercent) {
		s.turnTo(opened, now)
	}
}

func reached(n, of, least uint64, percent float64) bool {
	return of >= least && float64(n)*100 >= percent*float64(of)
}

// back counts consecutive failures for the backoff. Once the backoff is in effect,
// failures of requests that were already under way then are not counted again.
func (s *state) back(started, now time.Time, failed bool) {
	switch {
	case s.config.failures == 0:
	case !failed:
		if !started.Before(s.backoff.failedAt) {
			s.backoff.failed, s.backoff.until = 0, time.Time{}
		}
	case s.backoff.failed >= s.config.failures && started.Before(s.backoff.failedAt):
	default:
		s.backoff.failed, s.backoff.failedAt = s.backoff.failed+1, now
		if s.backoff.failed >= s.config.failures {
			wait := s.config.base
			for n := s.config.failures; n < s.backoff.failed && wait < s.config.most; n++ {
				wait += min(wait, s.config.most-wait)
			}
			s.backoff.until = now.Add(min(wait, s.config.most))
		}
	}
}

func (s *state) report() *meshv1.RuleState {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &meshv1.RuleState{Key: s.key, State: s.circuit.breaker, Passed: s.totals.earlierPassed + s.totals.passed, Refused: s.totals.earlierRefused + s.totals.refused}
	switch s.config.trigger {
	case meshv1.Trigger_TRIGGER_FORCE_OPENED:
		out.State = opened
	case meshv1.Trigger_TRIGGER_FORCE_CLOSED:
		out.State = closed
	}
	if !s.circuit.since.IsZero() {
		out.SinceMs = s.circuit.since.UnixMilli()
	}
	return out
}
