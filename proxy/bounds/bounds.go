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
	for {
		before := a.taken.Load()
		above := a.above(before + n)
		fromPool := above - a.above(before)
		free := a.reserve(fromPool)
		if a.taken.CompareAndSwap(before, before+n) {
			return above == 0 || above <= free
		}
		a.reserve(-fromPool) // the account has changed meanwhile
	}
}

// Give gives n back.
func (a *Account) Give(n int64) {
	after := a.taken.Add(-n)
	a.reserve(a.above(after) - a.above(after+n))
}

// above returns how much of a total comes from the pool.
func (a *Account) above(total int64) int64 { return max(0, total-a.Own) }

// reserve takes n from the pool and returns what is free then. A total counts only what was
// reserved for it before: then takes at the same time see each other in the pool.
func (a *Account) reserve(n int64) (free int64) {
	if n == 0 {
		return a.Pool.free.Load()
	}
	return a.Pool.free.Add(-n)
}

// Taken returns what is taken now.
func (a *Account) Taken() int64 { return a.taken.Load() }
