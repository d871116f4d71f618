package expression

import (
	"fmt"
	"regexp/syntax"
	"sort"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestStepsOfExpressions(t *testing.T) {
	for _, c := range []struct {
		expression string
		path       int // at most
		tooCostly  bool
	}{
		{"/healthz", 100, false},
		{"/(a|b|c)/[0-9]{1,9}", 200, false},
		{"/v1/(users|groups)/[0-9]+/.*", 20000, false},
		{"/.*/secrets/.*", 25000, false},
		{`/\pL*/x`, 30000, false},
		{"/(?:.*a){20}_", 200000, false},
		{"/(?:.*a){250}_", meshv1.MaxMatchSteps + 1, true},
		{"/(?:.?){500}_", meshv1.MaxMatchSteps, false}, // paths are longer than what it matches
		{`/(?:\b.*){250}`, meshv1.MaxMatchSteps + 1, true},
	} {
		e, err := CompileWhole(c.expression)
		require.NoError(t, err)
		require.LessOrEqual(t, e.PathSteps, c.path, c.expression)
		require.LessOrEqual(t, e.HostSteps, e.PathSteps, c.expression)
		require.Equal(t, c.tooCostly, e.PathSteps > meshv1.MaxMatchSteps, "%s: %d", c.expression, e.PathSteps)
	}
}

// run counts the instructions that run for one text, as package regexp runs them.
func run(program *syntax.Prog, text string) (total int) {
	var waiting []uint32
	before := rune(-1)
	for i := 0; ; {
		c, width := rune(-1), 0
		if i < len(text) {
			c, width = utf8.DecodeRuneInString(text[i:])
		}
		flags, seen := syntax.EmptyOpContext(before, c), map[uint32]bool{}
		var next []uint32
		var add func(uint32)
		add = func(pc uint32) {
			if seen[pc] {
				return
			}
			seen[pc] = true
			total++
			switch inst := &program.Inst[pc]; inst.Op {
			case syntax.InstAlt, syntax.InstAltMatch:
				add(inst.Out)
				add(inst.Arg)
			case syntax.InstCapture, syntax.InstNop:
				add(inst.Out)
			case syntax.InstEmptyWidth:
				if syntax.EmptyOp(inst.Arg)&^flags == 0 {
					add(inst.Out)
				}
			case syntax.InstFail, syntax.InstMatch:
			default:
				next = append(next, pc)
			}
		}
		for _, pc := range waiting {
			if inst := &program.Inst[pc]; inst.MatchRune(before) {
				add(inst.Out)
			}
		}
		if i == 0 {
			add(uint32(program.Start))
		}
		if waiting = next; width == 0 || len(next) == 0 {
			return total
		}
		i, before = i+width, c
	}
}

// FuzzSteps compiles any expression and matches any text: no text takes more steps than are
// counted.
func FuzzSteps(f *testing.F) {
	for _, s := range []string{"/(?:.*a){20}_", `\pL{3}x*`, "(?i:k)+|ſ", `(?:\b.*){9}`, "[^/]*/b?", "(?s).*\n", "(a|b)*c"} {
		f.Add(s, "/aab_k/K\n\xff")
	}
	f.Fuzz(func(t *testing.T, s, text string) {
		text = text[:min(len(text), meshv1.MaxMatchedHost)]
		e, err := CompileWhole(s)
		if err != nil {
			return
		}
		parsed, err := syntax.Parse("^(?:"+s+")$", syntax.Perl)
		require.NoError(t, err)
		program, err := syntax.Compile(parsed.Simplify())
		require.NoError(t, err)
		require.LessOrEqual(t, e.HostSteps, e.PathSteps)
		if e.HostSteps <= meshv1.MaxMatchSteps {
			require.LessOrEqual(t, run(program, text), e.HostSteps, "%q %q", s, text)
		}
	})
}

// BenchmarkCostliestPaths matches the longest path with the costliest expression that is
// accepted for each of some kinds.
func BenchmarkCostliestPaths(b *testing.B) {
	for kind, text := range map[string]string{"(?:.*a){%d}_": "a", `(?:\b.*){%d}_`: "a ", `(?:\pL*){%d}_`: "é", "(?:.?){%d}_": "a", "(?:[a-m]*|a){%d}_": "a", "(?:(?i:k)*){%d}_": "k"} {
		compiled := func(n int) (*Whole, bool) {
			e, err := CompileWhole("/" + fmt.Sprintf(kind, n))
			return e, err == nil && e.PathSteps <= meshv1.MaxMatchSteps
		}
		e, _ := compiled(sort.Search(1000, func(n int) bool { _, ok := compiled(n + 1); return !ok }))
		path := ("/" + strings.Repeat(text, meshv1.MaxMatchedPath))[:meshv1.MaxMatchedPath]
		b.Run(kind, func(b *testing.B) {
			for b.Loop() {
				e.MatchString(path)
			}
			b.ReportMetric(float64(e.PathSteps), "steps")
		})
	}
}

// BenchmarkCompileCostliest compiles expressions that take long to count.
func BenchmarkCompileCostliest(b *testing.B) {
	for _, s := range []string{"(?:.*a){300}", "(?:[a-c]*[b-f]?[e-h]){150}_", `(?:\pL*){3}`, "(?:a*b*c*d*e*f*g*h*i*j*){50}", "(?:(.{97})*(.{101})*(.{103})*(.{107})*[a-z])*"} {
		b.Run(s, func(b *testing.B) {
			for b.Loop() {
				program, _, err := compile("^(?:" + s + ")$")
				require.NoError(b, err)
				newSteps(program).of(meshv1.MaxMatchedPath)
			}
		})
	}
}
