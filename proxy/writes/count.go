// Package writes counts the writes of a pod that may still take effect at the apiserver.
package writes

import (
	"cmp"
	"sync"
	"sync/atomic"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Unseen returns how long a write that a policy let through may still take effect if
// neither its response nor the apiserver's end of the connection was seen: the apiserver
// works on it until its own request timeout.
func Unseen(m *meshv1.PodPolicy) time.Duration {
	return cmp.Or(RequestTimeout(m), meshv1.DefaultRequestTimeout) + meshv1.LostWrite
}

// RequestTimeout returns the apiserver's request timeout according to a policy; 0 if the
// policy does not contain it.
func RequestTimeout(m *meshv1.PodPolicy) time.Duration {
	if m.GetSharding() == nil {
		return 0
	}
	return cmp.Or(time.Duration(m.GetSharding().GetRequestTimeoutSeconds())*time.Second, meshv1.DefaultRequestTimeout)
}

// Journal records writes in flight where they outlive this process. Its methods are safe
// for concurrent use and never block.
type Journal interface {
	// Begin precedes a write. Then comes End when it can have no effect any more, or Lose
	// when it may have for a while.
	Begin()
	End()
	Lose(left time.Duration)
	// Unseen is how long a write may take effect whose end was not seen.
	Unseen(d time.Duration)
}

// Record notes in a journal, which may be nil, that a write may take effect for a while,
// or not any more.
func Record(j Journal, left time.Duration) {
	switch {
	case j == nil:
	case left > 0:
		j.Lose(left)
	default:
		j.End()
	}
}

// Count counts what a policy let through that may still change something: each write
// from before its last byte is sent until it can have no effect any more.
type Count struct {
	n    atomic.Int64
	once sync.Once
	over func() // called once when n becomes 0; set before that

	mu    sync.Mutex
	lost  bool      // lost writes end at until; all of them count as one
	until time.Time // grows
}

// Over sets the function that is called once when nothing counts any more.
func (c *Count) Over(f func()) { c.over = f }

// Begin counts a write.
func (c *Count) Begin(j Journal) {
	if j != nil {
		j.Begin()
	}
	c.Raise()
}

// End ends a write that may take effect for a while, or not any more.
func (c *Count) End(j Journal, left time.Duration) {
	Record(j, left)
	if left > 0 {
		c.LowerAfter(left)
	} else {
		c.Lower()
	}
}

// Raise counts one more, without a journal.
func (c *Count) Raise() { c.n.Add(1) }

// Lower counts one less.
func (c *Count) Lower() {
	// A request that finds its policy replaced may raise the count from 0 for a moment.
	if c.n.Add(-1) == 0 {
		c.once.Do(c.over)
	}
}

// LowerAfter is Lower after a while. One timer serves all, because a pod can lose writes
// as fast as it makes them.
func (c *Count) LowerAfter(d time.Duration) {
	c.mu.Lock()
	first := !c.lost
	c.lost = true
	if until := time.Now().Add(d); until.After(c.until) {
		c.until = until
	}
	c.mu.Unlock()
	if first {
		time.AfterFunc(d, c.expire)
	} else {
		c.Lower()
	}
}

func (c *Count) expire() {
	c.mu.Lock()
	left := time.Until(c.until)
	c.lost = left > 0
	c.mu.Unlock()
	if left > 0 {
		time.AfterFunc(left, c.expire)
	} else {
		c.Lower()
	}
}
