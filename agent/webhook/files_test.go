package webhook

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A pod's file system that blocks holds one thread, however often the directory changes.
func TestOneReadingOfAPodsFilesAtATime(t *testing.T) {
	files := make(chan struct{}, 1)
	reading, unblock := make(chan struct{}), make(chan struct{})
	blocked := &Pod{Config: Config{Files: files, Processes: func() ([]int, error) {
		close(reading)
		<-unblock
		return nil, nil
	}}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = blocked.load(t.Context())
	}()
	<-reading

	calls := 0
	next := &Pod{Config: Config{Files: files, Processes: func() ([]int, error) {
		calls++
		return nil, nil
	}}}
	brief, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := next.load(brief)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Zero(t, calls)

	close(unblock)
	<-done
	_, err = next.load(t.Context())
	require.Error(t, err, "it has no process")
	require.Equal(t, 1, calls)
}
