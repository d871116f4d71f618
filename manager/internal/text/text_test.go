package text

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBounded(t *testing.T) {
	require.Equal(t, "abc", Bounded("abc", 3))
	require.Equal(t, "ab...", Bounded("abc", 2))
	require.Equal(t, "a...", Bounded("aä", 2), "no character is cut in two")
}
