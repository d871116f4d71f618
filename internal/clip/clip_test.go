package clip

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestJoin(t *testing.T) {
	for want, texts := range map[string][]string{"": nil, "a": {"a"}, "a, b": {"a", "b"}, "a, b and 2 more": {"a", "b", "c", "d"}} {
		require.Equal(t, want, Join(texts, 2, ", "))
	}
}
