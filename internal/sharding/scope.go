// Package sharding implements the sets of keys that shards own.
//
// A key is what an object is assigned by: the name of its namespace, or its uid. A Scope is a
// set of keys by their position in the key space (Hash): ranges of it, each for all buckets or
// for some. A named namespace is a range of width one. So unions, intersections and differences
// are exact, and every form of a scope (render.go) agrees with Owns on every key.
//
// The package is pure. The zero Scope owns nothing. Scopes are immutable, and Equal, String and
// the wire form depend only on the set.
package sharding

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// Scope is a set of keys in canonical form.
type Scope struct {
	parts []part // sorted by buckets; no two share a bucket, nor have equal ranges
}

// part is the ranges of some buckets.
type part struct {
	buckets uint32 // bit b for bucket b; not 0
	ranges  []Range
}

// Range is a part of the key space. It includes both ends.
type Range struct{ First, Last uint64 }

// Whole is the whole key space.
var Whole = Range{0, math.MaxUint64}

const allBuckets = math.MaxUint32

// All returns the scope that owns every key.
func All() Scope { return Of(Whole) }

// Of returns the scope of some ranges. A Range whose First is after its Last is empty.
func Of(ranges ...Range) Scope {
	return canonical(uniform(normal(ranges)))
}

// Keys returns the scope of the given keys.
func Keys(keys ...string) Scope {
	ranges := make([]Range, len(keys))
	for i, k := range keys {
		h := Hash(k)
		ranges[i] = Range{h, h}
	}
	return Of(ranges...)
}

// InBuckets returns the scope of some buckets. It ignores numbers that are not buckets.
func InBuckets(buckets ...int) Scope {
	var sets [Buckets][]Range
	for _, b := range buckets {
		if b >= 0 && b < Buckets {
			sets[b] = []Range{Whole}
		}
	}
	return canonical(sets)
}

// Owns reports whether a key is in the scope.
func (s Scope) Owns(key string) bool { return s.OwnsHash(Hash(key)) }

// OwnsHash is Owns for the hash of a key.
func (s Scope) OwnsHash(h uint64) bool {
	if len(s.parts) == 0 {
		return false
	}
	bit := uint32(1) << (Mix(h) % Buckets)
	for _, p := range s.parts {
		if p.buckets&bit == 0 {
			continue
		}
		i, found := slices.BinarySearchFunc(p.ranges, h, func(r Range, h uint64) int { return cmp.Compare(r.First, h) })
		return found || i > 0 && h <= p.ranges[i-1].Last
	}
	return false
}

// Empty reports whether the scope has no ranges. A scope whose ranges contain no hash of its
// buckets counts as not empty.
func (s Scope) Empty() bool { return len(s.parts) == 0 }

// Hull returns the narrowest range that contains the scope. It is not ok for the empty scope.
func (s Scope) Hull() (hull Range, ok bool) {
	hull = Range{math.MaxUint64, 0}
	for _, p := range s.parts {
		hull.First = min(hull.First, p.ranges[0].First)
		hull.Last = max(hull.Last, p.ranges[len(p.ranges)-1].Last)
	}
	return hull, !s.Empty()
}

// WithoutPoints returns the scope without ranges of a single hash: such as those of [Keys].
func (s Scope) WithoutPoints() Scope {
	sets := s.sets()
	for b, ranges := range sets {
		sets[b] = slices.DeleteFunc(slices.Clone(ranges), func(r Range) bool { return r.First == r.Last })
	}
	return canonical(sets)
}

// Everything reports whether the scope owns every key.
func (s Scope) Everything() bool { return s.Equal(All()) }

// Equal reports whether two scopes are the same set.
func (s Scope) Equal(t Scope) bool {
	return slices.EqualFunc(s.parts, t.parts, func(a, b part) bool {
		return a.buckets == b.buckets && slices.Equal(a.ranges, b.ranges)
	})
}

// Union returns the keys that any of the scopes owns.
func Union(scopes ...Scope) Scope {
	var out Scope
	for _, s := range scopes {
		out = combine(out, s, func(a, b []Range) []Range { return normal(slices.Concat(a, b)) })
	}
	return out
}

// Intersect returns the keys that both scopes own.
func (s Scope) Intersect(t Scope) Scope { return combine(s, t, intersect) }

// Minus returns the keys that s owns and t does not.
func (s Scope) Minus(t Scope) Scope {
	return combine(s, t, func(a, b []Range) []Range { return intersect(a, complement(b)) })
}

// Overlaps reports whether some key is in both.
func (s Scope) Overlaps(t Scope) bool { return !s.Intersect(t).Empty() }

// combine applies a set operation bucket by bucket.
func combine(s, t Scope, op func(a, b []Range) []Range) Scope {
	var out [Buckets][]Range
	a, b := s.sets(), t.sets()
	for i := range out {
		if i > 0 && same(a[i], a[i-1]) && same(b[i], b[i-1]) {
			out[i] = out[i-1]
			continue
		}
		out[i] = op(a[i], b[i])
	}
	return canonical(out)
}

// same reports whether two sets are the same slice.
func same(a, b []Range) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// sets returns the ranges of each bucket. The caller must not modify them.
func (s Scope) sets() (out [Buckets][]Range) {
	for _, p := range s.parts {
		for m := p.buckets; m != 0; m &= m - 1 {
			out[bits.TrailingZeros32(m)] = p.ranges
		}
	}
	return out
}

func uniform(ranges []Range) (out [Buckets][]Range) {
	for i := range out {
		out[i] = ranges
	}
	return out
}

// canonical groups buckets with equal ranges. Each set must be normal.
func canonical(sets [Buckets][]Range) Scope {
	var s Scope
next:
	for b, ranges := range sets {
		if len(ranges) == 0 {
			continue
		}
		for i := range s.parts {
			if slices.Equal(s.parts[i].ranges, ranges) {
				s.parts[i].buckets |= 1 << b
				continue next
			}
		}
		s.parts = append(s.parts, part{1 << b, ranges})
	}
	slices.SortFunc(s.parts, func(a, b part) int { return cmp.Compare(a.buckets, b.buckets) })
	return s
}

// normal sorts ranges, drops the empty ones, and joins those that touch.
func normal(ranges []Range) []Range {
	sorted := slices.DeleteFunc(slices.Clone(ranges), func(r Range) bool { return r.First > r.Last })
	slices.SortFunc(sorted, func(a, b Range) int { return cmp.Compare(a.First, b.First) })
	out := sorted[:0]
	for _, r := range sorted {
		if n := len(out); n > 0 && (out[n-1].Last == math.MaxUint64 || r.First <= out[n-1].Last+1) {
			out[n-1].Last = max(out[n-1].Last, r.Last)
			continue
		}
		out = append(out, r)
	}
	return out
}

// complement returns the complement of a normal set, which is normal.
func complement(ranges []Range) []Range {
	var out []Range
	next := uint64(0)
	for _, r := range ranges {
		if r.First > next {
			out = append(out, Range{next, r.First - 1})
		}
		if r.Last == math.MaxUint64 {
			return out
		}
		next = r.Last + 1
	}
	return append(out, Range{next, math.MaxUint64})
}

// intersect returns the intersection of normal sets, which is normal.
func intersect(a, b []Range) []Range {
	var out []Range
	for len(a) > 0 && len(b) > 0 {
		if first, last := max(a[0].First, b[0].First), min(a[0].Last, b[0].Last); first <= last {
			out = append(out, Range{first, last})
		}
		if a[0].Last < b[0].Last {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}
