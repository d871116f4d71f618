package expression

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCompileBoundsExpressions(t *testing.T) {
	const advice = "instructions, and at most 1200 are permitted: repeat less, or match without an expression"
	for s, why := range map[string]string{
		"^team-(a|b)$": "", "": "", ".{0,500}": "",
		"(?:.?){598}":                  "", // two instructions for each repetition
		"(?:.?){600}":                  "it compiles to 1202 " + advice,
		strings.Repeat(".{0,1000}", 3): "it compiles to more than 2000 " + advice,
		"((a{1,100}){1,100}){1,100}":   "invalid repeat count", strings.Repeat("(", 600) + "a" + strings.Repeat(")", 600): "compiles to 1203",
		strings.Repeat("a", Max+1): "more than 2000 characters", "(": "missing closing",
	} {
		e, err := Compile(s)
		if why == "" {
			require.NoError(t, err, s)
			require.LessOrEqual(t, e.Program, MaxProgram)
			continue
		}
		require.ErrorContains(t, err, why, s)
	}
}

// What the API takes is not refused without a reason.
func TestLongExpressionsWithoutRepetitionAreAccepted(t *testing.T) {
	for _, part := range []string{"a", "ab|", "a?", "(a)", "[a-c]x|", "(?i:k)", "a*b+", "^a$|"} {
		s := strings.Repeat(part, 1024/len(part))
		_, err := Compile(s)
		require.NoError(t, err, s)
	}
}

func TestExpressionsInUseAreShared(t *testing.T) {
	one, err := CompileWhole("shared-[a-y]{100}")
	require.NoError(t, err)
	other, err := CompileWhole("shared-[a-y]{100}")
	require.NoError(t, err)
	require.Same(t, one, other)
	require.False(t, one.MatchString("xshared-"), "the whole text")
	for _, s := range []string{"a(", "/(?:.*a){600}_", strings.Repeat("a", Max+1)} {
		_, err = CompileWhole(s)
		require.Error(t, err, s)
	}
}

func FuzzCompile(f *testing.F) {
	for _, s := range []string{"^team-(a|b)$", "(?:.?){1000}", `\pL{3}`, "("} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if e, err := Compile(s); err == nil {
			require.LessOrEqual(t, e.Program, MaxProgram)
			e.MatchString("team-a")
		}
	})
}

// BenchmarkCostliest matches the longest name of a namespace with one of the costliest
// expressions that are accepted.
func BenchmarkCostliest(b *testing.B) {
	e, err := Compile("(?:.?){598}_")
	require.NoError(b, err)
	name := strings.Repeat("a", 63)
	for b.Loop() {
		e.MatchString(name)
	}
}
