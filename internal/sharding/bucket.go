package sharding

import "strconv"

// Buckets is the number of buckets.
const Buckets = 32

// Hash returns the position of a key in the key space: FNV-1a 64, as in Kubernetes' shardRange
// (k8s.io/apimachinery/pkg/sharding).
func Hash[K string | []byte](key K) uint64 {
	h := uint64(0xcbf29ce484222325)
	for i := range len(key) {
		h ^= uint64(key[i])
		h *= 0x100000001b3
	}
	return h
}

// Bucket returns the bucket of a namespace, 0 to 31. The function must never change, because
// objects carry its result as a label.
func Bucket(namespace string) int { return bucketOf(Hash(namespace)) }

// BucketLabel returns Bucket as the value of a label.
func BucketLabel(namespace string) string { return strconv.Itoa(Bucket(namespace)) }

// bucketOf mixes a hash by the finaliser of Murmur3, because FNV-1a alone puts similar names into
// the same bucket.
func bucketOf(h uint64) int {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	return int(h % Buckets)
}
