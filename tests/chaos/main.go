// Chaos breaks the mesh in every way that it promises to survive, on the cluster of
// tests/cluster with ctrlmesh installed, under clients that ask all the time, and
// counts what came of it.
//
// A suite is made of parts, which run one after the other and can be run alone
// (-only). Each part prints what it does as it goes. The last line has the counts of
// all; the program exits with status 0 only if every one is as it must be. Whether a
// request leaked is decided by the apiserver's audit log and the agents' access
// lines, never by what a client believes.
//
// It takes the mesh apart, and the capture suite in the end uninstalls it: it is not for a
// cluster that somebody works with.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// A part takes some of a suite's counts.
type part struct {
	name string
	run  func(context.Context, *world, *result) error
}

// suites by their name. The last part of capture leaves no mesh to test; those of
// sharding have an operator of their own each, as the first of traffic has.
var suites = map[string][]part{
	"capture": {
		{"starts", starts},
		{"kills", kills},
		{"upgrades", upgrades},
		{"losses", losses},
		{"failures", failures},
		{"hostile", hostile},
		{"cleanup", cleanup},
	},
	shardingSuite: {
		{"explore", explored},
		{"scale", scale},
		{"canary", canary},
		{"restart", restart},
		{"storm", storm},
		{"balance", balance},
		{"failover", failover},
		{"adoption", adoption},
		{"restore", restore},
		{"unfenced", unfenced},
	},
	trafficSuite: {
		{"faults", underFaults},
		{"egress", egress},
	},
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == onNodeCommand {
		if err := onNode(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "chaos:", err)
			os.Exit(1)
		}
		return
	}
	suite := flag.String("suite", "capture", "which suite to run")
	only := flag.String("only", "", "run these parts alone, by their names with commas between")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := run(ctx, *suite, *only)
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run reports whether all counts are as they must be. An error means that none
// could be taken.
func run(ctx context.Context, suite, only string) (bool, error) {
	parts, err := choose(suite, only)
	if err != nil {
		return false, err
	}
	w, err := newWorld(ctx)
	if err != nil {
		return false, err
	}
	defer w.close()
	r := &result{}
	for _, p := range parts {
		start := time.Now()
		w.say("%s", p.name)
		r.ran = append(r.ran, p.name)
		if err := p.run(ctx, w, r); err != nil {
			r.doubt("%s: %v", p.name, err)
			w.say("  ! %v", err)
		}
		w.say("%s took %v", p.name, time.Since(start).Round(time.Second))
		if ctx.Err() != nil {
			break
		}
	}
	fmt.Println()
	for _, doubt := range r.wrong(suite) {
		fmt.Println("!", doubt)
	}
	fmt.Println(r.line(suite))
	return len(r.wrong(suite)) == 0, nil
}

// choose the parts of a suite, in its order.
func choose(suite, only string) ([]part, error) {
	parts, ok := suites[suite]
	if !ok {
		return nil, fmt.Errorf("no suite %q: there are capture, sharding and traffic", suite)
	}
	if only == "" {
		return parts, nil
	}
	wanted := strings.Split(only, ",")
	var out []part
	for _, p := range parts {
		if slices.Contains(wanted, p.name) {
			out = append(out, p)
			wanted = slices.DeleteFunc(wanted, func(name string) bool { return name == p.name })
		}
	}
	if len(wanted) > 0 {
		return nil, fmt.Errorf("suite %s has no part %q", suite, wanted)
	}
	return out, nil
}
