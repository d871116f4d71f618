// Package bucket assigns namespaces to the 32 buckets of the label method.
//
// The function is fixed for ever: objects carry its result as a label.
package bucket

import (
	"hash/fnv"
	"strconv"
)

// Count is the number of buckets.
const Count = 32

// Hash is the bucket of a namespace, 0 to 31.
//
// FNV-1a alone puts like names into like buckets, so its 64 bits are mixed by
// the finaliser of Murmur3.
func Hash(namespace string) int {
	f := fnv.New64a()
	f.Write([]byte(namespace)) // never fails
	h := f.Sum64()
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	return int(h % Count)
}

// Label is Hash as the value of a label.
func Label(namespace string) string { return strconv.Itoa(Hash(namespace)) }
