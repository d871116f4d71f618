// Package bounds divides a bounded resource of a node among its pods, or among peers.
package bounds

import "sync/atomic"

// Pool is the part of a resource that the pods of a node share.
type Pool struct{ free atomic.Int64 }

// Account is one pod's use of a resource. The pod may use Own, and above that as much of
// the pool as it leaves free. So one pod alone gets half of the pool, and n pods
// get 1/(n+1) each: a part is left for others however many pods take all they can.
type Account struct {
	Pool  *Pool
	Own   int64
	taken atomic.Int64
}

// NewPool returns a pool of which one pod alone gets most, including its own part.
func NewPool(most, own int64) *Pool {
	p := &Pool{}
	p.free.Store(2 * (most - own))
	return p
}

// Take takes n and reports whether the total is within bounds. It takes n in either case,
// so the caller must give it back.
func (a *Account) Take(n int64) bool {
	now := a.taken.Add(n)
	if now <= a.Own {
		return true
	}
	above := now - a.Own
	return above <= a.Pool.free.Add(max(0, now-n-a.Own)-above)
}

// Give gives n back.
func (a *Account) Give(n int64) {
	if before := a.taken.Add(-n) + n; before > a.Own {
		a.Pool.free.Add(before - max(a.Own, before-n))
	}
}

// Taken returns what is taken now.
func (a *Account) Taken() int64 { return a.taken.Load() }
