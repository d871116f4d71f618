// Gotest runs `go test -json`, keeps the events in .run/results and shows progress.
//
//	gotest [-tests] [-rerun] [-dir DIR] NAME ARGUMENT...   runs go test with the arguments
//	gotest -summary                                        prints what failed in the runs that are kept
//
// With -tests it shows each test, else each package. With -rerun it runs end-to-end tests
// that failed once more, alone, if package results allows it, and prints FLAKY for each that
// passes then.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/results"
)

// kept is where the events of runs are, relative to the root of the repository.
const kept = ".run/results"

func main() {
	tests := flag.Bool("tests", false, "show each test")
	rerun := flag.Bool("rerun", false, "run failed end-to-end tests once more")
	dir := flag.String("dir", "", "directory of the module, if it is another one")
	summary := flag.Bool("summary", false, "print what failed in the runs that are kept")
	flag.Parse()
	var err error
	switch {
	case *summary:
		err = printSummary(os.Stdout)
	case flag.NArg() < 2:
		err = errors.New("needs a name for the run and the arguments of go test")
	default:
		r := runner{name: flag.Arg(0), args: flag.Args()[1:], tests: *tests, dir: *dir}
		err = r.runAll(*rerun)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
		os.Exit(1)
	}
}

type runner struct {
	name  string
	args  []string
	tests bool
	dir   string
}

// runAll runs the tests, and those that may run once more.
func (r *runner) runAll(rerun bool) error {
	if err := os.MkdirAll(kept, 0o755); err != nil {
		return err
	}
	for _, old := range r.files() {
		if err := os.Remove(old); err != nil {
			return err
		}
	}
	run, failed := r.run(r.name, r.args)
	if failed == nil || !rerun {
		return failed
	}
	failures := run.Failures()
	names := results.Rerun(failures)
	if len(names) == 0 {
		return failed
	}
	for _, name := range names {
		fmt.Printf("running %s once more, alone\n", name)
		args := append(slices.Clone(r.args), "-run", "^"+name+"$")
		if _, err := r.run(r.name+"."+name, args); err != nil {
			return fmt.Errorf("%s failed twice: %w", name, err)
		}
	}
	return r.excuse(failures)
}

// excuse keeps a note of failures that a second run did not show.
func (r *runner) excuse(failures []results.Failure) error {
	var lines strings.Builder
	for _, f := range failures {
		fmt.Fprintf(&lines, "FLAKY %s: %s\n", f, f.Message())
	}
	fmt.Print(lines.String())
	return os.WriteFile(filepath.Join(kept, r.name+".flaky"), []byte(lines.String()), 0o600)
}

// files returns the files of earlier runs of this name.
func (r *runner) files() []string {
	files, _ := filepath.Glob(filepath.Join(kept, r.name+".*")) // the pattern is valid
	return files
}

// run runs go test once. The error is that of go test.
func (r *runner) run(name string, args []string) (*results.Run, error) {
	file, err := os.Create(filepath.Join(kept, name+".json"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr, cmd.Dir = os.Stderr, r.dir
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	lines, read := make(chan []byte), make(chan error, 1)
	go func() { read <- scan(io.TeeReader(stdout, file), lines) }()
	shown := &progress{Run: results.New(), tests: r.tests, began: time.Now()}
	shown.follow(lines)
	if err := errors.Join(<-read, cmd.Wait()); err != nil {
		return shown.Run, fmt.Errorf("go test: %w", err)
	}
	return shown.Run, nil
}

// scan sends each line of the output, and closes lines at the end.
func scan(output io.Reader, lines chan<- []byte) error {
	defer close(lines)
	for buffered := bufio.NewReader(output); ; {
		line, err := buffered.ReadBytes('\n')
		if len(line) > 0 {
			lines <- line
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return err
		}
	}
}

// progress shows how a run goes on.
type progress struct {
	*results.Run
	tests bool
	began time.Time
}

const quiet = 30 * time.Second // without a line

func (p *progress) follow(lines <-chan []byte) {
	tick := time.NewTimer(quiet)
	defer tick.Stop()
	for {
		select {
		case line, ok := <-lines:
			if !ok {
				return
			}
			e := results.Parse(line)
			p.Add(e)
			if p.show(e) {
				tick.Reset(quiet)
			}
		case <-tick.C:
			p.showRunning()
			tick.Reset(quiet)
		}
	}
}

// show prints what an event has to say. It reports whether it printed a line.
func (p *progress) show(e results.Event) bool {
	ended := e.Action == "pass" || e.Action == "fail" || e.Action == "skip"
	switch {
	case e.Action == "build-output":
		fmt.Print(e.Output)
	case e.Test == "" && e.Action == "output" && strings.Contains(e.Output, "\t") && !strings.HasPrefix(e.Output, "?"):
		fmt.Print(e.Output) // ok, FAIL and the time
	case e.Test != "" && e.Action == "fail":
		fmt.Print(strings.Join(p.Output(e.Package, e.Test), ""))
	case p.tests && e.Test != "" && ended && strings.Count(e.Test, "/") < 2:
		fmt.Printf("%4.0f s  %s %s (%.1f s)\n", time.Since(p.began).Seconds(), e.Action, e.Test, e.Elapsed)
	default:
		return false
	}
	return true
}

func (p *progress) showRunning() {
	const most = 6
	names := p.Running(!p.tests)
	rest := ""
	if n := len(names) - most; n > 0 {
		names, rest = names[:most], fmt.Sprintf(" and %d more", n)
	}
	if len(names) == 0 {
		names = []string{"building"}
	}
	fmt.Printf("%4.0f s  ... %s%s\n", time.Since(p.began).Seconds(), strings.Join(names, ", "), rest)
}

// printSummary prints the failures and the flaky tests of all runs that are kept.
func printSummary(w io.Writer) error {
	const lines = 20
	flaky, _ := filepath.Glob(filepath.Join(kept, "*.flaky"))
	for _, path := range flaky {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fmt.Fprint(w, string(text))
	}
	runs, _ := filepath.Glob(filepath.Join(kept, "*.json"))
	for _, path := range runs {
		name := strings.TrimSuffix(path, ".json")
		if slices.Contains(flaky, name+".flaky") {
			continue // each failure passed the second time
		}
		if err := printFailures(w, path, lines); err != nil {
			return err
		}
	}
	return nil
}

func printFailures(w io.Writer, path string, lines int) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	run := results.New()
	if err := run.Read(file); err != nil {
		return err
	}
	results.Print(w, run.Failures(), lines)
	return nil
}
