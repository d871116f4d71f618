// Demo adopts a running, unmodified operator on the cluster of tests/cluster with ctrlmesh
// installed, and shows the result.
//
// It runs tests/operators/tally as a StatefulSet of two outside the mesh, over objects in
// many namespaces. While the objects change all the time, it applies a ShardingConfig of
// two shards and sets the label of the mesh on the pod template. Half of the objects exist
// before that, and half are created while the shards work. Then it prints a table and one
// line of counts, all read from the cluster, from the apiserver's audit log and from the
// agents' access logs. It exits with status 0 only if every count is as expected. It can be
// run again on the same cluster.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

func main() {
	d := demo{start: time.Now()}
	flag.IntVar(&d.namespaces, "namespaces", 12, "number of namespaces")
	flag.IntVar(&d.objects, "objects", 600, "number of objects")
	flag.BoolVar(&d.sharded, "sharded", true, "adopt the operator; otherwise one pod does all the work, and the demo fails")
	flag.DurationVar(&d.timeout, "timeout", 4*time.Minute, "how long to wait for the operator at most")
	flag.Parse()

	kube.Main("demo", d.run)
}

type demo struct {
	namespaces, objects int
	sharded             bool
	timeout             time.Duration

	*kube.Cluster
	start time.Time
}

// run reports whether all counts are as expected. It returns an error if it cannot count.
func (d *demo) run(ctx context.Context) (bool, error) {
	if d.namespaces < shards || d.objects < d.namespaces {
		return false, fmt.Errorf("%d objects in %d namespaces cannot be divided among %d shards", d.objects, d.namespaces, shards)
	}
	var err error
	if d.Cluster, err = kube.Connect(tallyv1.AddToScheme); err != nil {
		return false, err
	}
	played, err := d.play(ctx)
	if played.began.IsZero() {
		return false, err
	}
	// After a failure, the counts show its effect.
	if err != nil {
		d.say("failed: %v", err)
		d.printLogs(ctx)
	}
	w, err := d.look(ctx, played)
	if err != nil {
		return false, err
	}
	got := w.count()
	want := counts{Shards: shards, Namespaces: d.namespaces, Objects: d.objects, Leaders: shards}
	fmt.Println()
	printTable(os.Stdout, w.rows())
	for _, doubt := range w.doubts() {
		fmt.Println("!", doubt)
	}
	d.printNext(ctx, w)
	fmt.Println(got)
	return got == want && len(w.doubts()) == 0, nil
}

// say prints the progress of the demo.
func (d *demo) say(format string, args ...any) {
	fmt.Printf("[%5.1f s] %s\n", time.Since(d.start).Seconds(), fmt.Sprintf(format, args...))
}
