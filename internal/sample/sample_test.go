package sample

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// of returns the sample of numbered namespaces.
func of(first, last int) []uint64 {
	var all []uint64
	for i := first; i < last; i++ {
		all = append(all, Key(fmt.Sprintf("tenant-%04d", i), ""))
	}
	return Merge(all)
}

func TestSamplesOfDisjointSetsHaveNothingInCommon(t *testing.T) {
	require.Empty(t, Common(of(0, 5000), of(5000, 10000)))
	require.Empty(t, Common(of(0, 10), of(10, 20)))
	require.Empty(t, Common(append(of(0, 1), of(0, 1)...)), "one sample has it twice")
}

func TestSamplesShowCommonPartOfLargeSets(t *testing.T) {
	require.Len(t, Common(of(0, 5000), of(0, 5000)), Size)
	require.NotEmpty(t, Common(of(0, 5000), of(2500, 7500)))
	require.NotEmpty(t, Common(of(0, 5000), of(0, 500)), "a tenth")
}

func TestMergedSampleIsThatOfTheUnion(t *testing.T) {
	require.Equal(t, of(0, 3000), Merge(of(0, 1000), of(500, 2000), of(1500, 3000)))
	require.Len(t, of(0, 3000), Size)
	require.Len(t, Merge(of(0, 3), of(1, 5)), 5)
}

func TestKeysOfNamespacesAndObjectsDiffer(t *testing.T) {
	seen := map[uint64]bool{}
	for _, key := range []uint64{Key("a", ""), Key("a", "b"), Key("", "a"), Key("ab", ""), Key("b", "a"), Key("", "")} {
		require.False(t, seen[key])
		require.NotZero(t, key)
		seen[key] = true
	}
}

// Agents and managers of different versions compare keys.
func TestKeysAreStable(t *testing.T) {
	require.Equal(t, uint64(0xd47084e0f7c5d5ad), Key("default", ""))
	require.Equal(t, uint64(0x8b30837a1c70feed), Key("default", "one"))
}
