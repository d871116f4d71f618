package agent

import (
	"log/slog"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOnlyLaterPodsTakeOverACleanedNode(t *testing.T) {
	c := &cleaner{podStart: 10}
	assert.Error(t, c.MayTakeOver(9))
	assert.Error(t, c.MayTakeOver(11), "not done")
	c.done.Store(true)
	assert.Error(t, c.MayTakeOver(9))
	assert.NoError(t, c.MayTakeOver(11), "the mesh was installed again")
}

func TestFailedCleanupLeavesNoSocket(t *testing.T) {
	dir := t.TempDir()
	o := Options{Dirs: Dirs{RunDir: dir, CgroupDir: t.TempDir()}, Logger: slog.New(slog.DiscardHandler)}
	err := Cleanup(t.Context(), o, func() error { t.Error("it is not clean"); return nil })
	require.ErrorContains(t, err, "no unified cgroup hierarchy")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, entries)
}
