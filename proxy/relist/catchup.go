package relist

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"
)

const (
	// CatchUp bounds how long a cache is awaited. client-go lists about a second after a
	// watch was refused with 410. If that happens again within two minutes it waits longer, a
	// minute at most. A watch that belonged to no cache is not opened again.
	CatchUp = 70 * time.Second
	// Resuming is how long clients may take to resume the watches that an earlier proxy had
	// open when it ended.
	Resuming = 3 * time.Second
	// Deciding is how long a decision may take that a controller began before its last
	// cache was filled.
	Deciding = time.Second
)

// catchUp records which caches were not filled since a policy change, and under which
// policies they were filled before.
//
// A program that starts waits for all its caches. One that gains keys while it runs does
// not: each cache is filled in its own time, by a supplement or a list, and meanwhile a controller may see an owner
// without its dependents, and remove its finalizer.
type catchUp struct {
	going   atomic.Bool // false: nothing is awaited
	before  []filledUnder
	awaited map[View]awaited
	filled  time.Time // when the last cache was that was awaited; zero: none yet
}

type filledUnder struct {
	policy Policy    // nil: unknown
	until  time.Time // when it was replaced
}

// awaited counts caches with identical requests.
type awaited struct {
	caches int
	since  time.Time
}

// begin notes that a policy is replaced, whose caches may have to be filled again.
func (c *catchUp) begin(old Policy) {
	now := time.Now()
	c.lapse(now)
	c.before = append(c.before, filledUnder{old, now})
	for v, a := range c.awaited {
		c.awaited[v] = awaited{a.caches, now}
	}
	c.going.Store(true)
}

// await awaits a cache of a view, if fewer than limit views are awaited. One that was not
// complete since the last change is awaited already. A watch of one object is likely to be a
// wait for it, which ends.
func (c *catchUp) await(v View, complete bool, limit int) {
	a, known := c.awaited[v]
	if v.one || !known && len(c.awaited) >= limit {
		return
	}
	if known && !complete {
		a.caches--
	}
	if c.awaited == nil {
		c.awaited = map[View]awaited{}
	}
	c.awaited[v] = awaited{a.caches + 1, time.Now()}
	c.filled = time.Time{}
}

// fill notes that a cache of a view was filled.
func (c *catchUp) fill(v View) {
	a, known := c.awaited[v]
	switch {
	case !known:
		return
	case a.caches > 1:
		c.awaited[v] = awaited{a.caches - 1, a.since}
		return
	}
	delete(c.awaited, v)
	if len(c.awaited) == 0 {
		c.filled = time.Now()
	}
}

// lapse forgets what is over, and reports whether some cache may still miss objects.
func (c *catchUp) lapse(now time.Time) bool {
	maps.DeleteFunc(c.awaited, func(_ View, a awaited) bool { return now.Sub(a.since) >= CatchUp })
	c.before = slices.DeleteFunc(c.before, func(f filledUnder) bool { return now.Sub(f.until) >= CatchUp })
	deciding := now.Sub(c.filled) < Deciding
	if len(c.awaited) == 0 && !c.filled.IsZero() && !deciding {
		c.before, c.filled = nil, time.Time{}
	}
	if len(c.before) == 0 {
		c.going.Store(false)
		return false
	}
	return len(c.awaited) > 0 || deciding
}

// Restored notes that an earlier proxy had the policy in force since a time: some caches may
// not have been filled since then.
func (l *Ledger) Restored(since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if age := now.Sub(since); l.policy != nil || age < 0 || age >= CatchUp {
		return
	}
	l.catchUp.begin(nil)
	l.catchUp.filled = now.Add(Resuming - Deciding)
}

// CatchingUp reports whether some cache of the pod was filled under an earlier policy of
// which lacks is true. The policy is nil if it is unknown.
func (l *Ledger) CatchingUp(lacks func(before Policy) bool) bool {
	c := &l.catchUp
	if !c.going.Load() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return c.lapse(time.Now()) && slices.ContainsFunc(c.before, func(f filledUnder) bool { return lacks(f.policy) })
}

// Filled notes that the cache of a watch is complete: client-go opens a watch when it has
// stored the whole list, unless the list, or the difference from it, comes with the watch.
func (t *Ticket) Filled() {
	l := t.ledger
	if t.watch == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !t.open() || t.watch.filled {
		return
	}
	t.watch.filled = true
	l.catchUp.fill(t.view)
}

// age moves what happened into the past.
func (c *catchUp) age(by time.Duration) {
	for i := range c.before {
		c.before[i].until = c.before[i].until.Add(-by)
	}
	for v, a := range c.awaited {
		c.awaited[v] = awaited{a.caches, a.since.Add(-by)}
	}
	if !c.filled.IsZero() {
		c.filled = c.filled.Add(-by)
	}
}
