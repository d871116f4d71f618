package harness

import (
	"fmt"
	"slices"
	"strings"
)

// Result is the outcome of a run, apart from a suite's counts.
type Result struct {
	Ran    []string // the parts that ran
	doubts []string // findings that fail the run and are in no count
}

// Doubt records a finding that fails the run and is in no count.
func (r *Result) Doubt(format string, args ...any) {
	r.doubts = append(r.doubts, fmt.Sprintf(format, args...))
}

// DoubtErr records an error of a part. It ignores nil.
func (r *Result) DoubtErr(part string, err error) {
	if err != nil {
		r.Doubt("%s: %v", part, err)
	}
}

// taken reports whether a part that takes the count has run.
func (r *Result) taken(c Count) bool {
	return slices.ContainsFunc(c.Parts, func(part string) bool { return slices.Contains(r.Ran, part) })
}

// Line returns the last line of the output. The value of a count that no part took is "-".
func (r *Result) Line(s Suite) string {
	out := []string{s.Name + ":"}
	for _, c := range s.Counts() {
		if !r.taken(c) {
			c.Value = "-"
		}
		out = append(out, c.Name+"="+c.Value)
	}
	return strings.Join(out, " ")
}

// Failures returns the reasons why the run failed. It returns none if the run succeeded.
func (r *Result) Failures(s Suite) []string {
	out := slices.Clone(r.doubts)
	var details []string
	for _, c := range s.Counts() {
		if r.taken(c) && !c.OK {
			out = append(out, c.Name+"="+c.Value)
		}
		details = append(details, c.Details...)
	}
	out = append(out, details...)
	if len(r.Ran) == 0 {
		out = append(out, "no part of "+s.Name+" ran")
	}
	return out
}
