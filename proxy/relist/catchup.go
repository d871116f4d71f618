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
	// refused: they are of a cluster of another shard. What is written elsewhere does not wait.
	refused bool
}

// begin notes that a policy is replaced, whose caches may have to be filled again.
func (c *catchUp) begin(old Policy) {
	now := time.Now()
	c.lapse(now)
	c.before = append(c.before, filledUnder{old, now})
	for v, a := range c.awaited {
		c.awaited[v] = awaited{a.caches, now, a.refused}
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
	c.awaited[v] = awaited{a.caches + 1, time.Now(), false}
	c.filled = time.Time{}
}

// Refused notes that a list or watch in a cluster of another shard was refused: if its client has
// a cache, that misses what happens there.
func (l *Ledger) Refused(v View) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c, now := &l.catchUp, time.Now()
	if a, known := c.awaited[v]; known {
		c.awaited[v] = awaited{a.caches, now, true}
		return
	}
	c.lapse(now)
	if v.one || len(c.awaited) >= l.Bounds.Awaited {
		return
	}
	if c.awaited == nil {
		c.awaited = map[View]awaited{}
	}
	c.awaited[v] = awaited{1, now, true}
}

// fill notes that a cache of a view was filled.
func (c *catchUp) fill(v View) {
	a, known := c.awaited[v]
	switch {
	case !known:
		return
	case a.caches > 1:
		c.awaited[v] = awaited{a.caches - 1, a.since, false}
		return
	}
	delete(c.awaited, v)
	if !c.awaits(func(_ View, a awaited) bool { return !a.refused }) {
		c.filled = time.Now()
	}
}

// lapse forgets what is over, and reports whether anything is left.
func (c *catchUp) lapse(now time.Time) bool {
	maps.DeleteFunc(c.awaited, func(_ View, a awaited) bool { return now.Sub(a.since) >= CatchUp })
	c.before = slices.DeleteFunc(c.before, func(f filledUnder) bool { return now.Sub(f.until) >= CatchUp })
	if len(c.awaited) == 0 && !c.filled.IsZero() && !c.deciding(now) {
		c.before, c.filled = nil, time.Time{}
	}
	if len(c.before) == 0 {
		c.going.Store(false)
	}
	return len(c.before) > 0
}

func (c *catchUp) deciding(now time.Time) bool { return now.Sub(c.filled) < Deciding }

// lags reports whether some cache may still miss objects by which a write in a cluster is decided.
func (c *catchUp) lags(now time.Time, cluster string) bool {
	at := hashOf(cluster)
	return c.deciding(now) || c.awaits(func(v View, a awaited) bool { return !a.refused || v.cluster == at })
}

func (c *catchUp) awaits(which func(View, awaited) bool) bool {
	for v, a := range c.awaited {
		if which(v, a) {
			return true
		}
	}
	return false
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

// CatchingUp reports whether some cache of the pod, by which it decides what to write in a
// cluster, was filled under an earlier policy of which lacks is true. The policy is nil if it is
// unknown.
func (l *Ledger) CatchingUp(cluster string, lacks func(before Policy) bool) bool {
	c := &l.catchUp
	if !c.going.Load() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	return c.lapse(now) && c.lags(now, cluster) && slices.ContainsFunc(c.before, func(f filledUnder) bool { return lacks(f.policy) })
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
		c.awaited[v] = awaited{a.caches, a.since.Add(-by), a.refused}
	}
	if !c.filled.IsZero() {
		c.filled = c.filled.Add(-by)
	}
}
