package results_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/results"
)

// read returns the run of a script with a line per event: ACTION TEST, or "TEST: OUTPUT".
func read(t *testing.T, script string) *results.Run {
	t.Helper()
	var stream strings.Builder
	for line := range strings.Lines(script) {
		line = strings.TrimSpace(line)
		e := results.Event{Package: "p"}
		if test, output, ok := strings.Cut(line, ": "); ok {
			e.Action, e.Test, e.Output = "output", test, output+"\n"
		} else {
			e.Action, e.Test, _ = strings.Cut(line, " ")
		}
		encoded, err := json.Marshal(e)
		require.NoError(t, err)
		stream.Write(append(encoded, '\n'))
	}
	run := results.New()
	require.NoError(t, run.Read(strings.NewReader(stream.String())))
	return run
}

func names(failures []results.Failure) (names []string) {
	for _, f := range failures {
		names = append(names, f.String())
	}
	return names
}

func TestFailuresAreTestsWithoutFailedSubtests(t *testing.T) {
	run := read(t, `start
		run A
		run A/one
		A/one: wrong
		fail A/one
		run A/two
		pass A/two
		fail A
		run B
		skip B
		run C
		fail C
		fail`)
	failures := run.Failures()
	assert.Equal(t, []string{"A/one", "C"}, names(failures))
	assert.Equal(t, []string{"wrong\n"}, failures[0].Output)
}

func TestTestsThatDidNotEndFail(t *testing.T) {
	failures := read(t, `start
		run A
		A: panic: no
		fail`).Failures()
	assert.Equal(t, []string{"A"}, names(failures))
	assert.False(t, failures[0].Complete)
}

func TestPackageFailsByItsBuild(t *testing.T) {
	run := results.New()
	require.NoError(t, run.Read(strings.NewReader(`{"ImportPath":"p [p.test]","Action":"build-output","Output":"p.go:1: undefined: x\n"}
{"Action":"start","Package":"p"}
{"Action":"output","Package":"p","Output":"FAIL\tp [build failed]\n"}
{"Action":"fail","Package":"p","FailedBuild":"p [p.test]"}
go: no such thing
`)))
	failures := run.Failures()
	assert.Equal(t, []string{"p"}, names(failures))
	assert.Equal(t, []string{"p.go:1: undefined: x\n", "FAIL\tp [build failed]\n"}, failures[0].Output)
}

func TestRunningNamesTheInnermost(t *testing.T) {
	run := read(t, `start
		run A
		run A/one
		run B
		pause B`)
	assert.Equal(t, []string{"A/one"}, run.Running(false))
	assert.Equal(t, []string{"p"}, run.Running(true))
}

func TestThoseThatWaitHaveNotFailed(t *testing.T) {
	run := read(t, `start
		run A
		pause A
		run B
		pause B
		cont B
		fail`)
	assert.Equal(t, []string{"B"}, names(run.Failures()), "A did not run when the package ended")
}

func TestRerun(t *testing.T) {
	for name, tt := range map[string]struct {
		script string
		want   []string
	}{
		"one":              {"run A\nA: not yet\nfail A\nfail", []string{"A"}},
		"subtests of one":  {"run A\nrun A/1\nfail A/1\nrun A/2\nfail A/2\nfail A\nfail", []string{"A"}},
		"three":            {"run A\nfail A\nrun B\nfail B\nrun C\nfail C\nfail", nil},
		"two owners":       {"run A\nA: invariant broken: two owners\nfail A\nfail", nil},
		"data race":        {"run A\nA: WARNING: DATA RACE\nfail A\nfail", nil},
		"panic":            {"run A\nA: panic: index\nfail", nil},
		"time limit":       {"run A\nrun B\nfail B\nfail", nil},
		"without a test":   {"start\nfail", nil},
		"nothing failed":   {"run A\npass A\npass", nil},
		"one of two is it": {"run A\nA: invariant broken: leak\nfail A\nrun B\nfail B\nfail", nil},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, tt.want, results.Rerun(read(t, tt.script).Failures()))
		})
	}
}

func TestMessageIsTheReason(t *testing.T) {
	for name, tt := range map[string]struct{ output, want string }{
		"testify": {"=== RUN   A\n    a_test.go:3: \n        \tError Trace:\t/a_test.go:3\n        \tError:      \tShould be false\n", "Should be false"},
		"plain":   {"    a_test.go:3: two of three\n--- FAIL: A (0.1s)\n", "a_test.go:3: two of three"},
		"none":    {"=== RUN   A\n--- FAIL: A (0.1s)\n", "no output"},
	} {
		t.Run(name, func(t *testing.T) {
			f := results.Failure{Output: strings.SplitAfter(tt.output, "\n")}
			assert.Equal(t, tt.want, f.Message())
		})
	}
}

func TestPrintEndsAfterTheFirstLines(t *testing.T) {
	var out strings.Builder
	results.Print(&out, []results.Failure{{Package: "p", Test: "A", Output: []string{"=== RUN   A\n", "one\n", "two\n", "three\n"}}}, 2)
	assert.Equal(t, "FAIL: A (p)\n    one\n    two\n    ...\n", out.String())
}
