// Package bounds shares what a node has of something among its pods.
package bounds

import "sync/atomic"

// Pool is what the pods of a node share of something.
type Pool struct{ free atomic.Int64 }

// Account is one pod's part of a pool: something of its own, and above that never more
// than is left for the others. So one pod alone gets half of the pool, and n of
// them 1/(n+1) each: however many take all they can, others find something.
type Account struct {
	Pool  *Pool
	Own   int64
	taken atomic.Int64
}

// NewPool returns a pool of which one pod alone gets most, its own included.
func NewPool(most, own int64) *Pool {
	p := &Pool{}
	p.free.Store(2 * (most - own))
	return p
}

// Take takes n and reports whether that is within bounds; it is taken either way.
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
