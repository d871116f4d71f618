// Intruder is a root process in a pod that attacks the mesh. Tests run it by exec inside of a
// member and read its result.
//
//	intruder sniff                 reads every packet on the loopback of its own network while it sends requests
//	intruder join                  listens where the mesh listens for the pod
//	intruder forge                 connects to the apiserver in every way that might bypass a redirection
//	intruder misdirect DECOY:PORT  requests another address from the mesh
//	intruder borrow FILE           sends requests with the token in a file
//	intruder misname               writes a lock whose name is not UTF-8
//	intruder flood KIND            exhausts the mesh, for some seconds
//	intruder exhaust KIND URL...   exhausts servers to which any pod can connect, for some seconds
//
// It prints one JSON object: whether the mesh withstood the attack, and why. Status 1 means
// that the attack could not be made, which proves nothing.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// verdict is the result of an attack.
type verdict struct {
	Held bool   `json:"held"`
	Why  string `json:"why"`
}

func held(format string, args ...any) (verdict, error) {
	return verdict{true, fmt.Sprintf(format, args...)}, nil
}

func broken(format string, args ...any) (verdict, error) {
	return verdict{false, fmt.Sprintf(format, args...)}, nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	v, err := run(ctx, os.Args[1:])
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(v)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "intruder:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (verdict, error) {
	if len(args) > 2 && args[0] == "exhaust" {
		return exhaust(ctx, args[1], args[2:])
	}
	target := 1 // arguments after the command
	if len(args) > 0 && (args[0] == "misdirect" || args[0] == "borrow" || args[0] == "flood") {
		target = 2
	}
	if len(args) != target {
		return verdict{}, fmt.Errorf("sniff, join, forge, misdirect, borrow, misname, flood or exhaust?")
	}
	switch args[0] {
	case "sniff":
		return sniff(ctx)
	case "join":
		return join()
	case "forge":
		return forge()
	case "misdirect":
		return misdirect(ctx, args[1])
	case "borrow":
		return borrow(ctx, args[1])
	case "misname":
		return misname(ctx)
	case "flood":
		return flood(ctx, args[1])
	}
	return verdict{}, fmt.Errorf("unknown command %q", args[0])
}
