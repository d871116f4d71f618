package kube

import (
	"bufio"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSeekLineReturnsToBeginningOfLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	require.NoError(t, os.WriteFile(path, []byte("one\ntwo\nthree\n"), 0o600))
	for offset, want := range map[int64]string{0: "one", 2: "one", 4: "two", 5: "two", 7: "two", 8: "three"} {
		f, err := os.Open(path)
		require.NoError(t, err)
		require.NoError(t, seekLine(f, offset))
		line, _, err := bufio.NewReader(f).ReadLine()
		require.NoError(t, err)
		require.Equal(t, want, string(line), "from %d", offset)
		require.NoError(t, f.Close())
	}
}
