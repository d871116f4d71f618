package results

import (
	"fmt"
	"io"
	"regexp"
	"strings"
)

// location is a line that only has the place of a message: "    mesh_test.go:12: ".
var location = regexp.MustCompile(`^\S+\.go:\d+:$`)

// Print writes each failure with the first lines of its output.
func Print(w io.Writer, failures []Failure, lines int) {
	for _, f := range failures {
		fmt.Fprintf(w, "FAIL: %s (%s)\n", f, f.Package)
		printed := 0
		for line := range strings.SplitSeq(strings.Join(f.Output, ""), "\n") {
			trimmed := strings.TrimSpace(line)
			if trimmed == "" || strings.HasPrefix(trimmed, "=== ") {
				continue
			}
			if printed == lines {
				fmt.Fprintf(w, "    ...\n")
				break
			}
			fmt.Fprintf(w, "    %s\n", strings.TrimRight(line, " "))
			printed++
		}
	}
}
