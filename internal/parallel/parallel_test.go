package parallel

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEachKeepsOrderAndLimit(t *testing.T) {
	t.Parallel()
	var now, most atomic.Int32
	errs := Each([]int{0, 1, 2, 3, 4, 5, 6, 7}, 3, func(n int) error {
		at := now.Add(1)
		defer now.Add(-1)
		for before := most.Load(); at > before && !most.CompareAndSwap(before, at); before = most.Load() {
		}
		if n%2 == 0 {
			return nil
		}
		return fmt.Errorf("error %d", n)
	})
	require.LessOrEqual(t, most.Load(), int32(3))
	require.EqualError(t, errors.Join(errs...), "error 1\nerror 3\nerror 5\nerror 7")
	require.Len(t, errs, 8)
	require.Empty(t, Each(nil, 3, func(int) error { return nil }))
}
