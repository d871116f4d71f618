// Package sample compares sets of names that different processes know, without sending the
// names. A sample has the smallest hashes of a set. All processes use the same hash, so that
// samples of sets with much in common have hashes in common.
package sample

import (
	"cmp"
	"slices"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Size is the number of hashes in a sample of a set that has more.
const Size = 32

// Key returns the hash of a namespace, or of an object if name is not empty. It never
// changes: agents and managers of different versions compare keys. Zero is no key.
func Key(namespace, name string) uint64 {
	h := sharding.Hash(namespace)
	if name != "" {
		h = sharding.Continue(sharding.Continue(h, "/"), name)
	}
	// Shards own ranges of hashes, and each sample must have its part of every range.
	return max(1, sharding.Mix(h))
}

// Merge returns the sample of the union of sets by their samples, sorted.
func Merge(samples ...[]uint64) []uint64 {
	return Least(Size, samples...)
}

// Least returns the n least elements of the union of sets, sorted.
func Least[T cmp.Ordered](n int, sets ...[]T) []T {
	all := slices.Concat(sets...)
	slices.Sort(all)
	all = slices.Compact(all)
	return slices.Clip(all[:min(len(all), n)])
}

// Common returns the keys that at least two of the samples have, sorted.
func Common(samples ...[]uint64) (out []uint64) {
	seen := map[uint64]int{}
	for _, s := range samples {
		for _, key := range slices.Compact(slices.Sorted(slices.Values(s))) {
			if seen[key]++; seen[key] == 2 {
				out = append(out, key)
			}
		}
	}
	slices.Sort(out)
	return out
}
