package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// longest bounds a whole run.
const longest = 40 * time.Minute

func main() {
	var o options
	flag.StringVar(&o.parts, "parts", "operator,throughput,manager", "what to measure; throughput only beside operator")
	o.shards = []int32{1, 2, 3, 5}
	flag.Func("shards", "numbers of shards to measure the operator with, besides off the mesh; the first is compared with (default 1,2,3,5)", o.parse)
	flag.IntVar(&o.namespaces, "namespaces", 100, "namespaces of the operator's objects")
	flag.IntVar(&o.each, "each", 40, "objects in each of those")
	flag.Float64Var(&o.rate, "rate", 100, "changes a second while processor time is measured")
	flag.DurationVar(&o.lasts, "lasts", 20*time.Second, "how long that is")
	flag.IntVar(&o.rounds, "rounds", 4, "how often each setting has its turn")
	flag.IntVar(&o.few, "few", 10_000, "divided objects at first")
	flag.IntVar(&o.many, "many", 100_000, "and in the end")
	flag.Parse()
	kube.Main("sharding", func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, longest)
		defer cancel()
		missed, err := run(ctx, o)
		if len(missed) > 0 {
			fmt.Fprintf(os.Stderr, "sharding: over the limit: %s\n", strings.Join(missed, "; "))
		}
		return len(missed) == 0, err
	})
}

type options struct {
	parts            string
	namespaces, each int
	rate             float64
	lasts            time.Duration
	rounds           int
	few, many        int
	shards           []int32
}

func (o *options) has(part string) bool { return slices.Contains(strings.Split(o.parts, ","), part) }

func (o *options) parse(list string) error {
	o.shards = nil
	for field := range strings.SplitSeq(list, ",") {
		n, err := strconv.ParseInt(field, 10, 32)
		if err != nil || n < 1 {
			return fmt.Errorf("%q is no number of shards", field)
		}
		o.shards = append(o.shards, int32(n))
	}
	return nil
}

// bench is the cluster and the results.
type bench struct {
	*kube.Cluster
	options
}

func run(ctx context.Context, o options) (missed []string, err error) {
	cluster, err := kube.Connect(tallyv1.AddToScheme)
	if err != nil {
		return nil, err
	}
	b := &bench{cluster, o}
	parts := map[string]func(context.Context) ([]string, error){"operator": b.operator, "manager": b.manager}
	for part := range strings.SplitSeq(o.parts, ",") {
		if part == "throughput" {
			continue
		}
		measure := parts[part]
		if measure == nil {
			return missed, fmt.Errorf("no such part: %s", part)
		}
		over, err := measure(ctx)
		missed = append(missed, over...)
		if err != nil {
			return missed, fmt.Errorf("%s: %w", part, err)
		}
	}
	return missed, nil
}

// progress prints to stderr, apart from the tables.
func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

// until polls a condition for as long as a busy machine may take.
func until(ctx context.Context, what string, cond func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 5*time.Minute, errors.New("it has had 5 minutes"))
	defer cancel()
	return kube.Until(ctx, what, cond)
}
