package kube

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestUntilPollsUntilSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		require.NoError(t, Until(t.Context(), "three", func(context.Context) error {
			if n++; n < 3 {
				return fmt.Errorf("only %d", n)
			}
			return nil
		}))
		require.Equal(t, 3, n)
	})
}

func TestUntilReturnsLastError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := Until(ctx, "pods", func(ctx context.Context) error {
			if time.Sleep(7 * time.Second); ctx.Err() != nil {
				return ctx.Err()
			}
			return errors.New("1 of 2")
		})
		require.ErrorContains(t, err, "waiting for pods: 1 of 2")
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestUntilReturnsPermanentErrorsAtOnce(t *testing.T) {
	broken := errors.New("broken")
	err := Until(t.Context(), "pods", func(context.Context) error { return Never(broken) })
	require.ErrorIs(t, err, broken)
}
