// Real tries published operators on the cluster of tests/cluster with ctrlmesh installed: each is
// built from its module, runs without the mesh, is adopted, sharded, rescaled and removed. It
// prints a line per operator and a summary, and exits with status 0 only if no key had two owners,
// all changes were reconciled, nothing stopped silently, and the end states are equal.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/real/trial"
)

func main() {
	only := flag.String("only", "", "try these operators alone, by their names with commas between")
	build := flag.Bool("build", false, "build the operators and do not run them")
	shards := flag.String("shards", "2,3,2", "the numbers of shards, one after the other")
	page := flag.String("page", "", "write the last result of each operator as a page of the documentation into this file")
	flag.Parse()

	kube.Main("operators", func(ctx context.Context) (bool, error) { return run(ctx, options{*only, *shards, *page, *build}) })
}

type options struct {
	only, shards, page string
	build              bool
}

// run reports whether the trials of all operators succeeded.
func run(ctx context.Context, opts options) (bool, error) {
	c, err := kube.Connect()
	if err != nil {
		return false, err
	}
	start := time.Now()
	say := func(format string, args ...any) {
		fmt.Printf("[%6.1f s] %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
	}
	operators, err := choose(opts.only)
	if err != nil {
		return false, err
	}
	plan := trial.Full(say)
	if err := json.Unmarshal([]byte("["+opts.shards+"]"), &plan.Sizes); err != nil || len(plan.Sizes) == 0 {
		return false, fmt.Errorf("reading -shards=%s: numbers with commas between are needed", opts.shards)
	}
	var results []*trial.Result
	for _, o := range operators {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		if r := try(ctx, c, o, plan, opts.build); r != nil {
			results = append(results, r)
		}
	}
	if opts.build {
		return len(results) == 0, nil
	}
	if opts.page != "" && ctx.Err() == nil {
		if err := writePage(c, opts.page); err != nil {
			return false, err
		}
	}
	fmt.Println()
	for _, r := range results {
		fmt.Println(r)
	}
	line, ok := trial.Summary(results)
	fmt.Println(line)
	return ok, nil
}

// try builds an operator and runs its trial. If it is only to be built, there is a result only
// if that fails.
func try(ctx context.Context, c *kube.Cluster, o *trial.Operator, plan trial.Schedule, build bool) *trial.Result {
	plan.Say("building %s", o.Name)
	b, err := trial.Build(ctx, c, o)
	if err != nil {
		plan.Say("  ! %v", err)
		return &trial.Result{Operator: o.Name, Problem: err.Error()}
	}
	if build {
		return nil
	}
	r, err := trial.Run(ctx, c, b, plan)
	if err != nil {
		plan.Say("  ! %v", err)
	}
	plan.Say("%s", r)
	if ctx.Err() != nil { // it shows nothing about the operator
		return r
	}
	if err := r.Save(c); err != nil {
		plan.Say("  ! %v", err)
	}
	return r
}

// writePage writes the last result of each operator, from this run or an earlier one.
func writePage(c *kube.Cluster, file string) error {
	latest, err := trial.Latest(c)
	if err != nil {
		return err
	}
	return failure.Wrap(os.WriteFile(file, []byte(trial.Page(latest)), 0o644), "writing the page")
}

// choose returns the named operators of the catalogue, all if none is named.
func choose(only string) ([]*trial.Operator, error) {
	all := trial.Catalogue()
	if only == "" {
		return all, nil
	}
	names := strings.Split(only, ",")
	chosen := slices.DeleteFunc(all, func(o *trial.Operator) bool {
		i := slices.Index(names, o.Name)
		if i >= 0 {
			names = slices.Delete(names, i, i+1)
		}
		return i < 0
	})
	if len(names) > 0 {
		return nil, fmt.Errorf("the catalogue has no operator %q", names)
	}
	return chosen, nil
}
