package intern

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestValuesAreSharedWhileInUse(t *testing.T) {
	var m Map[[64]byte]
	made := 0
	create := func(string) (*[64]byte, error) {
		made++
		return &[64]byte{1}, nil
	}
	one, err := m.Get("a", create)
	require.NoError(t, err)
	other, err := m.Get("a", create)
	require.NoError(t, err)
	require.Same(t, one, other)
	require.Equal(t, 1, made)
	_, err = m.Get("b", func(string) (*[64]byte, error) { return nil, errors.New("invalid") })
	require.Error(t, err)
	require.Len(t, m.by, 1)
	runtime.KeepAlive(one)

	require.Eventually(t, func() bool {
		runtime.GC()
		m.mu.Lock()
		defer m.mu.Unlock()
		return len(m.by) == 0
	}, 30*time.Second, time.Millisecond)
}
