package program

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRunBoundsTime(t *testing.T) {
	defer func() { longest = Time }()
	longest = 50 * time.Millisecond
	_, err := Run(t.Context(), "", "sleep", "60")
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestRunBoundsProcessorTime(t *testing.T) {
	defer func() { longest = Time }()
	longest = time.Hour // a busy machine takes long to give a program its processor time
	start := time.Now()
	_, err := Run(t.Context(), "", "sh", "-c", "while :; do :; done")
	require.ErrorContains(t, err, "CPU time limit exceeded")
	require.Greater(t, time.Since(start), processor*time.Second/2, "the kernel counts by ticks")
}

func TestTimeoutIsWhatWaitAllows(t *testing.T) {
	for _, c := range []struct {
		args []string
		want time.Duration
	}{
		{nil, Time},
		{[]string{"-S", "OUTPUT", "--wait", "2"}, 2 * time.Second},
		{[]string{"--wait", "0"}, 0},
		{[]string{"--wait", "3600"}, Time},
		{[]string{"--wait", "-1"}, Time},
		{[]string{"--wait"}, Time},
	} {
		require.Equal(t, c.want, timeout(c.args), "%q", c.args)
	}
}
