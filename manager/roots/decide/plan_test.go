package decide

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// In a rollout shards lack pods for a moment: nobody is restarted for that.
func TestPodOutOfPlaceBrieflyIsKept(t *testing.T) {
	t.Parallel()
	var p plan
	start := time.Unix(1000, 0)
	require.Empty(t, p.lasting([]string{"a", "b"}, start))
	require.Empty(t, p.lasting([]string{"a"}, start.Add(outdatedFor/2)))
	require.Equal(t, []string{"a"}, p.lasting([]string{"a", "b"}, start.Add(outdatedFor)), "b was in its place for a while")
}
