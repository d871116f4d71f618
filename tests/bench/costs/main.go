package main

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Limits of the cost of capture.
const (
	mostRatio     = 1.25 // a captured pod's connect to a plain one on the loopback
	mostMillis    = 5.0  // of the agent's processor time to capture a pod
	ratioUnit     = "redirected-ratio"
	openRatioUnit = "redirected-open-ratio"
)

func main() {
	measured, err := read(os.Stdin)
	if err != nil {
		fmt.Fprintf(os.Stderr, "costs: %v\n", err)
		os.Exit(1)
	}
	if missed := report(os.Stdout, measured); len(missed) > 0 {
		fmt.Fprintf(os.Stderr, "costs: over the limit, or not measured: %s\n", strings.Join(missed, "; "))
		os.Exit(1)
	}
}

// figures are the values of each unit of each benchmark, one for each run.
type figures map[string]map[string][]float64

// processors matches the suffix that the testing package adds to a benchmark's name.
var processors = regexp.MustCompile(`-\d+$`)

func read(r io.Reader) (figures, error) {
	all := figures{}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		name := processors.ReplaceAllString(strings.TrimPrefix(fields[0], "Benchmark"), "")
		if all[name] == nil {
			all[name] = map[string][]float64{}
		}
		for pair := range slices.Chunk(fields[2:], 2) { // after the name and the number of iterations
			value, err := strconv.ParseFloat(pair[0], 64)
			if err != nil || len(pair) != 2 {
				return nil, fmt.Errorf("not a benchmark's result: %s", lines.Text())
			}
			all[name][pair[1]] = append(all[name][pair[1]], value)
		}
	}
	return all, lines.Err()
}

// median returns the median, and false if there are no values.
func (f figures) median(name, unit string) (float64, bool) {
	sorted := slices.Sorted(slices.Values(f[name][unit]))
	if len(sorted) == 0 {
		return 0, false
	}
	return sorted[len(sorted)/2], true
}

// report prints the table and returns the limits that are exceeded.
func report(w io.Writer, measured figures) (missed []string) {
	p := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format, args...) }
	within := func(what string, value, limit float64, ok bool) string {
		if ok && value < limit {
			return "ok"
		}
		missed = append(missed, fmt.Sprintf("%s: %.2f, not under %.2f", what, value, limit))
		return "MISSED"
	}

	p("\n| connect() of a captured pod | us | of a plain one on the loopback | limit | |\n|---|--:|--:|--:|---|\n")
	for _, way := range []struct{ unit, name string }{{ratioUnit, "redirected"}, {openRatioUnit, "redirected, fail-open"}} {
		took, _ := measured.median("Connect", strings.TrimSuffix(way.unit, "ratio")+"ns")
		ratio, ok := measured.median("Connect", way.unit)
		p("| %s | %.1f | %.2f | < %.2f | %s |\n", way.name, took/1000, ratio, mostRatio, within("connect, "+way.name, ratio, mostRatio, ok))
	}

	p("\n| to capture a pod | agent's own CPU ms | programs it runs, CPU ms | limit of its own | |\n|---|--:|--:|--:|---|\n")
	captures := false
	for _, name := range slices.Sorted(maps.Keys(measured)) {
		way, ok := strings.CutPrefix(name, "Capture/")
		if !ok {
			continue
		}
		captures = true
		own, ok := measured.median(name, "own-ms/op")
		programs, _ := measured.median(name, "children-ms/op")
		p("| %s | %.2f | %.2f | < %.0f | %s |\n", way, own, programs, mostMillis, within("capture, "+way, own, mostMillis, ok))
	}
	if !captures {
		missed = append(missed, "capture: not measured")
	}

	p("\n| to check 110 captured pods, twice a second | %% of a core |\n|---|--:|\n")
	for _, name := range slices.Sorted(maps.Keys(measured)) {
		if way, ok := strings.CutPrefix(name, "Check/"); ok {
			share, _ := measured.median(name, "%core")
			p("| %s | %.1f |\n", way, share)
		}
	}
	return missed
}
