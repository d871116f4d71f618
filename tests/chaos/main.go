// Chaos breaks the mesh in every way that it promises to survive, on the cluster of
// tests/cluster with ctrlmesh installed, under clients that send requests all the time, and
// counts the outcome.
//
// A suite consists of parts, which run one after the other and can be run alone (-only). Each
// part prints its progress. The last line has the counts of all parts. The program exits with
// status 0 only if every count is as it must be. The apiserver's audit log and the agents'
// access lines decide whether a request leaked, never what a client believes.
//
// The program breaks the mesh, and the capture suite in the end uninstalls it: do not run it
// on a cluster in use.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/alerts"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/onnode"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/sharding"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/traffic"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

var suites = map[string]func(*harness.Testbed, *harness.Result) harness.Suite{
	"alerts":   alerts.New,
	"capture":  capture.New,
	"sharding": sharding.New,
	"traffic":  traffic.New,
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == onnode.Command {
		if err := onnode.Run(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "chaos:", err)
			os.Exit(1)
		}
		return
	}
	suite := flag.String("suite", "capture", "which suite to run")
	only := flag.String("only", "", "run these parts alone, by their names with commas between")
	flag.Parse()

	kube.Main("chaos", func(ctx context.Context) (bool, error) { return run(ctx, *suite, *only) })
}

// run reports whether all counts are as they must be. An error means that no count could
// be taken.
func run(ctx context.Context, name, only string) (bool, error) {
	w, r := &harness.Testbed{}, &harness.Result{}
	suite, parts, err := choose(w, r, name, only)
	if err != nil {
		return false, err
	}
	if err := w.Connect(ctx); err != nil {
		return false, err
	}
	defer w.Close()
	for _, p := range parts {
		start := time.Now()
		w.Logf("%s", p.Name)
		r.Ran = append(r.Ran, p.Name)
		if err := p.Run(ctx); err != nil {
			r.DoubtErr(p.Name, err)
			w.Logf("  ! %v", err)
		}
		w.Logf("%s took %v", p.Name, time.Since(start).Round(time.Second))
		if ctx.Err() != nil {
			break
		}
	}
	fmt.Println()
	failures := r.Failures(suite)
	for _, failure := range failures {
		fmt.Println("!", failure)
	}
	fmt.Println(r.Line(suite))
	return len(failures) == 0, nil
}

// choose returns a suite by its name, and those of its parts that only names.
func choose(w *harness.Testbed, r *harness.Result, name, only string) (harness.Suite, []harness.Part, error) {
	create, ok := suites[name]
	if !ok {
		return harness.Suite{}, nil, fmt.Errorf("no suite %q: there are alerts, capture, sharding and traffic", name)
	}
	suite := create(w, r)
	parts, err := suite.Select(only)
	return suite, parts, err
}
