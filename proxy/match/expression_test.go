package match

import (
	"regexp"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Pods have an expression together, and it goes when the last of them does.
func TestExpressionsAreShared(t *testing.T) {
	const expression = "shared-[a-y]{100}"
	match := &meshv1.HttpMatch{Host: &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: expression}}}
	inUse := func() *regexp.Regexp {
		expressions.Lock()
		defer expressions.Unlock()
		return expressions.by[expression].Value()
	}
	one, err := NewURL(match)
	require.NoError(t, err)
	first := inUse()
	require.NotNil(t, first)
	other, err := NewURL(match)
	require.NoError(t, err)
	require.Same(t, first, inUse())
	runtime.KeepAlive(one)
	runtime.KeepAlive(other)

	require.Eventually(t, func() bool {
		runtime.GC()
		expressions.Lock()
		defer expressions.Unlock()
		_, there := expressions.by[expression]
		return !there
	}, 30*time.Second, time.Millisecond)

	_, err = expressionOf("a(")
	require.Error(t, err)
}
