package limit

import (
	"math/bits"
	"time"
)

// bucket is a token bucket in integers, so that it never gives more than burst and limit
// per interval. golang.org/x/time/rate rounds, and gains tokens when the time goes back.
type bucket struct {
	burst, limit, interval uint64 // interval in nanoseconds, above 0

	tokens uint64
	frac   uint64 // fraction of the next token, in units of 1/interval
	last   time.Time
}

func newBucket(burst, limit, interval uint64) bucket {
	return bucket{burst: burst, limit: limit, interval: interval, tokens: burst}
}

func (b *bucket) advance(now time.Time) {
	elapsed := now.Sub(b.last)
	switch {
	case b.last.IsZero():
		b.last = now
		return
	case elapsed <= 0:
		return
	}
	b.last = now
	hi, lo := bits.Mul64(uint64(elapsed), b.limit)
	lo, carry := bits.Add64(lo, b.frac, 0)
	if hi += carry; hi < b.interval {
		more, frac := bits.Div64(hi, lo, b.interval)
		if b.tokens < b.burst && more < b.burst-b.tokens {
			b.tokens, b.frac = b.tokens+more, frac
			return
		}
	}
	b.tokens, b.frac = b.burst, 0
}

// wait returns how long an empty bucket stays empty; 0: forever.
func (b *bucket) wait() time.Duration {
	if b.limit == 0 || b.burst == 0 {
		return 0
	}
	return duration(ceil(b.interval-b.frac, b.limit))
}

// become changes the size and the rate of the bucket. It never adds tokens.
func (b *bucket) become(next bucket, now time.Time) {
	b.advance(now)
	next.tokens = min(b.tokens, next.burst)
	if next.tokens < next.burst && next.limit > 0 && b.limit > 0 {
		hi, lo := bits.Mul64(b.frac, next.interval)
		next.frac, _ = bits.Div64(hi, lo, b.interval) // frac < interval
	}
	next.last = now
	*b = next
}
