// Alerts runs a command beside a Prometheus on the cluster of tests/cluster, which evaluates the alerts of the
// mesh at sixtieths of their times, and says which of them fired and ended:
//
//	alerts make e2e-installed
//
// It exits with status 0 only if the command succeeded, and no alert fires in the end.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/prometheus"
)

// endWithin limits how long alerts may fire after the command: what was broken is repaired, and the ranges of
// hurried alerts are shorter.
const endWithin = 5 * time.Minute

func main() {
	kube.Main("alerts", func(ctx context.Context) (bool, error) { return run(ctx, os.Args[1:]) })
}

// run reports whether the command succeeded and all alerts have ended.
func run(ctx context.Context, command []string) (ok bool, err error) {
	if len(command) == 0 {
		return false, errors.New("no command to run beside Prometheus")
	}
	c, err := kube.Connect()
	if err != nil {
		return false, err
	}
	r, err := prometheus.Record(ctx, c)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	failed := cmd.Run()
	if failed != nil {
		fmt.Printf("! the command failed: %v\n", failed)
	}
	lasting := kube.UntilWithin(ctx, endWithin, "the end of all alerts", func(ctx context.Context) error {
		all, err := r.Alerts(ctx)
		for _, a := range all {
			if a.Firing {
				err = errors.Join(err, fmt.Errorf("%s fires", a.Name))
			}
		}
		return err
	})
	all, err := r.Alerts(ctx)
	if err != nil {
		return false, err
	}
	fired := 0
	for _, a := range all {
		if a.Fired {
			fired++
		}
		fmt.Println(describe(a))
	}
	fmt.Printf("alerts: fired=%d of=%d\n", fired, len(all))
	return failed == nil && lasting == nil, nil
}

func describe(a prometheus.Alert) string {
	switch {
	case a.Firing:
		return "! " + a.Name + ": fires still"
	case a.Fired:
		return "  " + a.Name + ": fired and ended"
	}
	return "  " + a.Name + ": did not fire"
}
