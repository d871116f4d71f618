package expression

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCompileBoundsExpressions(t *testing.T) {
	for s, why := range map[string]string{
		"^team-(a|b)$": "", "": "", ".{0,1000}": "",
		strings.Repeat(".{0,1000}", 3): "more than 2000 steps", "((a{1,100}){1,100}){1,100}": "repeat",
		strings.Repeat("a", Max+1): "more than 2000 characters", "(": "missing closing",
	} {
		re, err := Compile(s)
		if why == "" {
			require.NoError(t, err, s)
			require.NotNil(t, re)
			continue
		}
		require.ErrorContains(t, err, why, s)
	}
}
