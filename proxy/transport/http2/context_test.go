package http2

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

type testKey struct{}

func TestContextsOfStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base, end := context.WithCancel(context.WithValue(t.Context(), testKey{}, 7))
		defer end()
		c := &streamContext{base: base}
		require.Equal(t, 7, c.Value(testKey{}))
		require.NoError(t, c.Err())
		select {
		case <-c.Done():
			t.Fatal("done")
		default:
		}
		var called atomic.Int32
		call := func() { called.Add(1) }
		context.AfterFunc(c, call)
		stops := []func() bool{c.AfterFunc(call), c.AfterFunc(call), c.AfterFunc(call)}
		require.True(t, stops[1]())
		require.False(t, stops[1]())
		child, cancel := context.WithCancelCause(c)
		defer cancel(nil)
		other, cancelOther := context.WithCancelCause(c)
		cancelOther(errors.ErrUnsupported)

		c.cancel()
		c.cancel()
		synctest.Wait()
		require.EqualValues(t, 3, called.Load())
		require.False(t, stops[0]())
		require.ErrorIs(t, c.Err(), context.Canceled)
		<-c.Done()
		require.ErrorIs(t, context.Cause(child), context.Canceled)
		require.ErrorIs(t, context.Cause(other), errors.ErrUnsupported)
		require.ErrorIs(t, context.Cause(c), context.Canceled)
		require.NoError(t, base.Err())

		require.False(t, c.AfterFunc(call)(), "it has ended")
		synctest.Wait()
		require.EqualValues(t, 4, called.Load())
		require.Error(t, c.standard().Err())
		unasked := &streamContext{base: base}
		standard := unasked.standard()
		require.NoError(t, standard.Err())
		defer func() { require.ErrorIs(t, standard.Err(), context.Canceled) }()
		unasked.cancel()
		<-unasked.Done()
	})
}
