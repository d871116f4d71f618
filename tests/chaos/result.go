package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// result is what a run has counted.
type result struct {
	ran    []string // the parts
	doubts []string // what spoils the result and is in no count

	captureCounts
	sharding shardingCounts
	traffic  trafficCounts
}

func (r *result) doubt(format string, args ...any) {
	r.doubts = append(r.doubts, fmt.Sprintf(format, args...))
}

// field is one count of the last line.
type field struct {
	name  string
	parts []string // that take it
	value string
	holds bool
}

// number is a count that must be as wanted.
func number(part, name string, got, want int) field {
	return field{name, []string{part}, strconv.Itoa(got), got == want}
}

// fields are the counts of a suite.
func (r *result) fields(suite string) []field {
	switch suite {
	case shardingSuite:
		return r.sharding.fields(r.ran)
	case trafficSuite:
		return r.traffic.fields(&r.sharding)
	}
	return r.captureCounts.fields()
}

// taken says whether a part that takes the count has run.
func (r *result) taken(f field) bool {
	return slices.ContainsFunc(f.parts, func(part string) bool { return slices.Contains(r.ran, part) })
}

// line is the last line. A count that no part took is "-".
func (r *result) line(suite string) string {
	out := []string{suite + ":"}
	for _, f := range r.fields(suite) {
		if !r.taken(f) {
			f.value = "-"
		}
		out = append(out, f.name+"="+f.value)
	}
	return strings.Join(out, " ")
}

// wrong says what keeps the result from being good: of all parts that ran.
func (r *result) wrong(suite string) []string {
	out := slices.Clone(r.doubts)
	for _, f := range r.fields(suite) {
		if r.taken(f) && !f.holds {
			out = append(out, f.name+"="+f.value)
		}
	}
	for _, what := range r.left {
		out = append(out, "left: "+what)
	}
	if len(r.ran) == 0 {
		out = append(out, "no part of "+suite+" ran")
	}
	return out
}

// percentile of some times, by the nearest rank; 0 without any.
func percentile(all []time.Duration, share float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	all = slices.Sorted(slices.Values(all))
	rank := int(share*float64(len(all)) + 0.999999)
	return all[min(max(rank, 1), len(all))-1]
}

// doubtErr notes what went wrong in a part, if anything did.
func (r *result) doubtErr(part string, err error) {
	if err != nil {
		r.doubt("%s: %v", part, err)
	}
}
