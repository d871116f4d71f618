// Probe sends requests to the apiserver from inside a pod, like any client there: with the
// pod's own service account and without code of ctrlmesh. Tests run it by exec and read the
// JSON that it prints.
//
//	probe wait                           serves HTTP on :8080 and logs each request, until SIGTERM
//	probe pulse [flags]                  sends requests all the time and runs an informer, until SIGTERM; a line for each answer and change
//	probe host                           acts as a host other than the apiserver, on :80 and :443; a line for each request
//	probe visit [flags] HOST...          sends requests to other hosts all the time, until SIGTERM; a line for each answer
//	probe raw [flags] METHOD PATH...     sends requests in turn; prints status, headers and bodies unchanged
//	probe informer [flags] RESOURCE      runs a client-go informer; prints its objects and its requests
//
// `probe COMMAND -h` lists flags. Errors go to stderr, with status 1.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("wait, pulse, host, visit, raw or informer?")
	}
	var result any
	var err error
	switch command, args := args[0], args[1:]; command {
	case "wait":
		return wait(ctx)
	case "pulse":
		return pulse(ctx, args)
	case "host":
		return host(ctx)
	case "visit":
		return visitAll(ctx, args)
	case "raw":
		result, err = raw(ctx, args)
	case "informer":
		result, err = informer(ctx, args)
	default:
		return fmt.Errorf("unknown command %q", command)
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}
