// Package sample compares sets of names that different processes know, without sending the
// names. A sample has the smallest hashes of a set. All processes use the same hash, so that
// samples of sets with much in common have hashes in common.
package sample

import "slices"

// Size is the number of hashes in a sample of a set that has more.
const Size = 32

// Key returns the hash of a namespace, or of an object if name is not empty. It never
// changes: agents and managers of different versions compare keys. Zero is no key.
func Key(namespace, name string) uint64 {
	h := fnv(0xcbf29ce484222325, namespace)
	if name != "" {
		h = fnv(fnv(h, "/"), name)
	}
	// FNV gives similar names similar hashes, and shards own ranges of them. Each sample must
	// have its part of every range.
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return max(1, h^h>>33)
}

// fnv continues an FNV-1a hash.
func fnv(h uint64, text string) uint64 {
	for i := range len(text) {
		h = (h ^ uint64(text[i])) * 0x100000001b3
	}
	return h
}

// Merge returns the sample of the union of sets by their samples, sorted.
func Merge(samples ...[]uint64) []uint64 {
	all := slices.Concat(samples...)
	slices.Sort(all)
	all = slices.Compact(all)
	return slices.Clip(all[:min(len(all), Size)])
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
