package results

import (
	"slices"
	"strings"
)

// Invariant begins the message of an assertion that the mesh may never fail, not even once:
// two owners of an object, an unsharded request, a leak.
const Invariant = "invariant broken"

// final are the texts of failures that a second run does not excuse.
var final = []string{Invariant, "DATA RACE", "panic:", "fatal error:", "test timed out"}

// Rerun returns the top-level tests that may run once more after these failures: at most two
// failed, each in a package that went on to its end, and none by what must never happen.
func Rerun(failures []Failure) []string {
	const most = 2
	var names []string
	if len(failures) > most {
		return nil
	}
	for _, f := range failures {
		if f.Test == "" || !f.Complete || containsAny(strings.Join(f.Output, ""), final) {
			return nil
		}
		names = append(names, top(f.Test))
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func top(test string) string {
	name, _, _ := strings.Cut(test, "/")
	return name
}

func containsAny(text string, parts []string) bool {
	return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(text, part) })
}

// Message returns the first line of the failure's output that says what went wrong.
func (f Failure) Message() string {
	for _, line := range f.Output {
		line = strings.TrimSpace(line)
		switch {
		case line == "", strings.HasPrefix(line, "=== "), strings.HasPrefix(line, "--- "), location.MatchString(line), strings.HasPrefix(line, "Error Trace:"):
		case strings.HasPrefix(line, "Error:"):
			if text := strings.TrimSpace(strings.TrimPrefix(line, "Error:")); text != "" {
				return text
			}
		default:
			return line
		}
	}
	return "no output"
}
