// Command kubectl-ctrlmesh shows what the mesh does, and puts operators on it, by the objects of the API
// alone. In the PATH it is kubectl ctrlmesh.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/command"
	"github.com/ctrlmesh/ctrlmesh/internal/program"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	streams := genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}
	os.Exit(command.Run(ctx, streams, program.Version(), os.Args[1:]))
}
