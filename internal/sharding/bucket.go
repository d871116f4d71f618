package sharding

import "strconv"

// Buckets is the number of buckets.
const Buckets = 32

// Hash returns the position of a key in the key space: FNV-1a 64, as in Kubernetes' shardRange
// (k8s.io/apimachinery/pkg/sharding).
func Hash[K string | []byte](key K) uint64 { return Continue(0xcbf29ce484222325, key) }

// Continue returns the hash of a text of which h is the hash so far, followed by more.
func Continue[K string | []byte](h uint64, more K) uint64 {
	for i := range len(more) {
		h ^= uint64(more[i])
		h *= 0x100000001b3
	}
	return h
}

// Bucket returns the bucket of a namespace, 0 to 31. The function must never change, because
// objects carry its result as a label.
func Bucket(namespace string) int { return int(Mix(Hash(namespace)) % Buckets) }

// BucketLabel returns Bucket as the value of a label.
func BucketLabel(namespace string) string { return strconv.Itoa(Bucket(namespace)) }

// Mix spreads hashes by the finaliser of Murmur3, because FNV-1a alone gives similar names similar
// hashes.
func Mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
