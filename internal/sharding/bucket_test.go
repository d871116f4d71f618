package sharding

import (
	"fmt"
	"hash/fnv"
	"testing"

	"github.com/stretchr/testify/require"
)

// These values are stored on users' objects: a change of any of them is a bug.
func TestGolden(t *testing.T) {
	for name, want := range map[string]int{
		"": 6, "default": 13, "kube-system": 28, "ns-a": 15, "ns-b": 18, "tenant-0000": 28, "tenant-0001": 30,
	} {
		require.Equal(t, want, Bucket(name), "bucket of %q", name)
	}
}

func TestHashIsThatOfKubernetes(t *testing.T) {
	for _, key := range []string{"", "default", "6b1e9f5c-8d0f-4a71-9a3c-000000000000", "\xff\x00"} {
		f := fnv.New64a()
		f.Write([]byte(key))
		require.Equal(t, f.Sum64(), Hash(key))
		require.Equal(t, f.Sum64(), Hash([]byte(key)))
	}
}

func TestLikeNamesSpread(t *testing.T) {
	var counts [Buckets]int
	for i := range 1000 {
		counts[Bucket(fmt.Sprintf("tenant-%04d", i))]++
	}
	for b, n := range counts {
		require.Greater(t, n, 10, "bucket %d", b)
		require.Less(t, n, 60, "bucket %d", b)
	}
}
