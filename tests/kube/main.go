package kube

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Main runs a program until it ends or is interrupted. It exits with status 0 only if run
// succeeds and reports true.
func Main(name string, run func(context.Context) (ok bool, err error)) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}
