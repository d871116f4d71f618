package results

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// Event is one line of `go test -json`.
type Event struct {
	Action, Package, Test, Output string

	// ImportPath is set instead of Package while the package is built. FailedBuild is the
	// ImportPath because of which the package failed.
	ImportPath, FailedBuild string
	Elapsed                 float64 // seconds
}

// Run is what happened to the tests of one invocation.
type Run struct {
	tests  map[id]*test
	builds map[string][]string // output by ImportPath
}

type id struct{ pkg, name string } // name "": the package itself

type test struct {
	state       string // the last action that was no output
	output      []string
	failedBuild string
}

// New returns an empty Run.
func New() *Run { return &Run{map[id]*test{}, map[string][]string{}} }

// Parse returns the event of a line. A line of another form is output of no package.
func Parse(line []byte) Event {
	e := Event{}
	if !bytes.HasPrefix(line, []byte("{")) || json.Unmarshal(line, &e) != nil {
		return Event{Action: "build-output", Output: string(line) + "\n"}
	}
	return e
}

// Read adds all events of a stream.
func (r *Run) Read(from io.Reader) error {
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadBytes('\n')
		if line = bytes.TrimRight(line, "\n"); len(line) > 0 {
			r.Add(Parse(line))
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading test events: %w", err)
		}
	}
}

// Add adds one event.
func (r *Run) Add(e Event) {
	if e.Package == "" {
		if e.Action == "build-output" {
			r.builds[e.ImportPath] = append(r.builds[e.ImportPath], e.Output)
		}
		return
	}
	key := id{e.Package, e.Test}
	t := r.tests[key]
	if t == nil {
		t = &test{}
		r.tests[key] = t
	}
	switch e.Action {
	case "output":
		t.output = append(t.output, e.Output)
	case "fail":
		t.failedBuild = e.FailedBuild
		fallthrough
	default:
		t.state = e.Action
	}
}

// Output returns the lines that a test printed itself, without those of its subtests.
func (r *Run) Output(pkg, name string) []string { return r.tests[id{pkg, name}].output }

// Running returns what runs now, sorted: the tests without running subtests, or the packages.
func (r *Run) Running(packages bool) (names []string) {
	for key, t := range r.tests {
		switch {
		case packages != (key.name == ""), t.state != "run" && t.state != "cont" && t.state != "start":
		case packages:
			names = append(names, key.pkg)
		case !r.hasRunningSubtest(key):
			names = append(names, key.name)
		}
	}
	slices.Sort(names)
	return names
}

// Failure is a test that failed without a failed subtest. Test is "" if a package failed
// without a failed test.
type Failure struct {
	Package, Test string
	Output        []string
	// Complete is whether the package went on to its end.
	Complete bool
}

// String returns the name of the test or package.
func (f Failure) String() string {
	if f.Test == "" {
		return f.Package
	}
	return f.Test
}

// Failures returns what failed, sorted by package and test. A test that ran when its package
// ended (a panic, a time limit) has failed.
func (r *Run) Failures() []Failure {
	var failures []Failure
	for _, key := range slices.SortedFunc(maps.Keys(r.tests), compare) {
		if key.name == "" || !r.failed(key) || r.hasFailedSubtest(key) {
			continue
		}
		failures = append(failures, Failure{key.pkg, key.name, r.tests[key].output, r.complete(key.pkg)})
	}
	for _, key := range slices.SortedFunc(maps.Keys(r.tests), compare) {
		t := r.tests[key]
		if key.name == "" && t.state == "fail" && !slices.ContainsFunc(failures, func(f Failure) bool { return f.Package == key.pkg }) {
			failures = append(failures, Failure{Package: key.pkg, Output: slices.Concat(r.builds[t.failedBuild], t.output)})
		}
	}
	return failures
}

func compare(a, b id) int {
	if c := strings.Compare(a.pkg, b.pkg); c != 0 {
		return c
	}
	return strings.Compare(a.name, b.name)
}

// failed reports whether a test failed, or ran when its package ended. Tests that wait for others
// (t.Parallel) did neither.
func (r *Run) failed(key id) bool {
	state := r.tests[key].state
	return state != "pass" && state != "skip" && state != "pause"
}

// complete reports whether every test of the package has ended.
func (r *Run) complete(pkg string) bool {
	for key := range r.tests {
		if key.pkg == pkg && key.name != "" && !r.ended(key) {
			return false
		}
	}
	return true
}

func (r *Run) ended(key id) bool {
	state := r.tests[key].state
	return state == "pass" || state == "skip" || state == "fail"
}

func (r *Run) hasFailedSubtest(key id) bool { return r.hasSubtest(key, r.failed) }

func (r *Run) hasRunningSubtest(key id) bool {
	return r.hasSubtest(key, func(sub id) bool { return !r.ended(sub) })
}

func (r *Run) hasSubtest(key id, is func(sub id) bool) bool {
	for sub := range r.tests {
		if sub.pkg == key.pkg && strings.HasPrefix(sub.name, key.name+"/") && is(sub) {
			return true
		}
	}
	return false
}
