package manager

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// However often it is poked, a loop that rests leaves two thirds of the time to others.
func TestALoopRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3100*time.Millisecond)
		defer cancel()
		runs := 0
		var l *loop
		l = newLoop(slog.New(slog.DiscardHandler), "shares", 10*time.Millisecond, 0, func(context.Context) error {
			runs++
			time.Sleep(100 * time.Millisecond)
			l.poke()
			return nil
		})
		l.rests = true
		require.NoError(t, l.Start(ctx))
		require.Equal(t, 11, runs)
	})
}
