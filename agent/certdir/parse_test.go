package certdir

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRejectedContentsAreNotParsedAgain(t *testing.T) {
	var p parser
	_, first := p.parse([]byte("x"), []byte("y"))
	require.Error(t, first)
	for range 2 * parseBurst {
		_, again := p.parse([]byte("x"), []byte("y"))
		require.Same(t, first, again)
	}
	_, other := p.parse([]byte("xy"), nil)
	require.NotSame(t, first, other)
}

func TestContentsThatChangeTooOftenAreNotParsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p parser
		parsed := 0
		for i := range 200 { // one a second
			if _, err := p.parse([]byte{byte(i)}, nil); err != errTooOften { //nolint:errorlint // it is not wrapped
				parsed++
			}
			require.LessOrEqual(t, len(p.rejected), maxRejected)
			time.Sleep(time.Second)
		}
		require.Equal(t, parseBurst+200/10-1, parsed)
	})
}
