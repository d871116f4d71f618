package limit

import (
	"math"
	"math/bits"
	"time"
)

// turns divide a bucket among more pods than it has tokens. The wall clock is divided
// into slots. Slot s belongs to pod s mod of, which may pass one request within the
// window at the start of the slot.
//
// The first and the last of k requests are at least (k-1)*slot - window apart. The bucket
// allows (k-burst)*interval/limit. So a slot takes interval/limit, and its window at most
// burst-1 slots. With a burst of 1 the slot is longer by the window.
type turns struct {
	index, of    uint64
	slot, window uint64 // nanoseconds

	spent uint64    // the last slot that was used
	at    time.Time // when it was used; zero: never
	from  time.Time // no turns before
}

// landing is the preferred length of a window: a client that waits for whole seconds
// (Retry-After) then arrives within it.
const landing = 1100 * time.Millisecond

func newTurns(index, of, burst, limit, interval uint64) turns {
	slot := ceil(interval, limit)
	t := turns{index: index, of: of, slot: slot}
	if burst == 1 {
		t.window = max(slot/4, min(slot, uint64(landing)), 1)
		t.slot = add(slot, t.window)
		return t
	}
	t.window = min(mul(slot, burst-1), max(slot, uint64(landing)))
	return t
}

// turn returns the pod's last slot that has begun, and the nanoseconds since. ok is
// false if none has begun.
func (t *turns) turn(now time.Time) (slot, since uint64, ok bool) {
	unix := now.UnixNano()
	n := uint64(max(unix, 0)) / t.slot
	if unix < 0 || n < t.index {
		return 0, 0, false
	}
	slot = n - (n-t.index)%t.of
	return slot, uint64(unix) - slot*t.slot, true
}

func (t *turns) may(now time.Time) bool {
	slot, since, ok := t.turn(now)
	if !ok || since >= t.window || now.Before(t.from) {
		return false
	}
	// The wall clock may have been set back: keep the minimum distance as well.
	return t.at.IsZero() || slot != t.spent && now.Sub(t.at) >= duration(mul(t.slot, t.of)-t.window)
}

func (t *turns) take(now time.Time) {
	t.spent, _, _ = t.turn(now)
	t.at = now
}

// wait returns how long it takes until a turn begins. If possible, it chooses a turn whose
// window contains a whole number of seconds from now, and returns that number.
func (t *turns) wait(now time.Time) time.Duration {
	_, since, ok := t.turn(now)
	round := mul(t.slot, t.of)
	next := uint64(0)
	switch {
	case ok:
		next = round - min(since, round)
	case now.UnixNano() >= 0:
		next = mul(t.index, t.slot) - min(uint64(now.UnixNano()), mul(t.index, t.slot))
	}
	if quiet := t.from.Sub(now); quiet > 0 && next < uint64(quiet) {
		next = add(next, mul((uint64(quiet)-next+round-1)/round, round))
	}
	first := next
	for range 64 {
		if late := seconds(next) - min(next, seconds(next)); late < t.window {
			return duration(seconds(next))
		}
		next = add(next, round)
	}
	return duration(first)
}

// seconds rounds up to whole seconds.
func seconds(ns uint64) uint64 { return mul(ceil(ns, uint64(time.Second)), uint64(time.Second)) }

// ceil divides and rounds up.
func ceil(a, b uint64) uint64 { return a/b + min(a%b, 1) }

// add and mul saturate at the maximum of a Duration.

func add(a, b uint64) uint64 { return min(a+min(b, math.MaxInt64), math.MaxInt64) }

func mul(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	if hi > 0 {
		return math.MaxInt64
	}
	return min(lo, math.MaxInt64)
}

func duration(ns uint64) time.Duration { return time.Duration(min(ns, math.MaxInt64)) }
