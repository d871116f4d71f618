// Package program runs the iptables programs with bounds on time, processor time, memory
// and output.
//
// A process with CAP_NET_ADMIN in a pod can fill the tables of the pod's network
// namespace, and the programs read all of them.
//
// The package also makes every binary that imports it a multi-call binary: under the
// name of a program with [Suffix], such as "iptables-bounded", it runs that program with
// the same bounds. This is for go-iptables, which sets none itself.
package program

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Suffix ends the names under which the binary runs a program with bounds.
	Suffix = "-bounded"
	// Time is the longest time that a program may run. A program that makes progress on a
	// busy node may be slow: its work is bounded by processor, and Time bounds only waiting,
	// also for a processor.
	//
	// The agent's loop waits meanwhile, so Time must be less than the 23 s after which the
	// kubelet restarts an agent whose loop has stalled: it counts as stalled 3 s after its
	// last turn, and three liveness probes in a row, 10 s apart, must fail.
	Time = 20 * time.Second

	// processor is processor time in seconds. The programs use a few milliseconds of it, and
	// a second for a table of 60,000 rules.
	processor = 2
	memory    = 64 << 20 // address space, in bytes
	output    = 64 << 10 // bytes of standard output, and of standard error

	// exitUnbounded is the status when the program did not exit by itself. The programs
	// do not use it: their status 1 means that a chain does not exist.
	exitUnbounded = 125
)

// longest is Time, except in tests.
var longest = Time

// init comes before main because the agent's other packages take longer to initialize
// than the program takes to run.
func init() {
	if len(os.Args) == 0 {
		return
	}
	if name, ok := strings.CutSuffix(filepath.Base(os.Args[0]), Suffix); ok {
		os.Exit(bounded(name, os.Args[1:]))
	}
}

// bounded runs the program and returns the exit status.
func bounded(name string, args []string) int {
	ctx, cancel := context.WithTimeout(context.Background(), timeout(args))
	defer cancel()
	out, err := Run(ctx, "", name, args...)
	if err == nil {
		_, err = os.Stdout.WriteString(out)
	}
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode()
	}
	return exitUnbounded
}

// timeout returns the seconds that --wait gives the program for the lock of the tables, at
// most Time. The programs of nftables have no such lock; here it bounds the whole run.
func timeout(args []string) time.Duration {
	if i := slices.Index(args, "--wait"); i >= 0 && i+1 < len(args) {
		if seconds, err := strconv.ParseUint(args[i+1], 10, 16); err == nil {
			return min(Time, time.Duration(seconds)*time.Second)
		}
	}
	return Time
}

// Run runs a program in the calling thread's network namespace, and returns its standard
// output.
func Run(ctx context.Context, input, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	command := exec.CommandContext(ctx, name, args...)
	command.WaitDelay = time.Second
	command.Stdin = strings.NewReader(input)
	var stdout, stderr buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	err := command.Start()
	if err == nil {
		if err = limit(command.Process.Pid); err != nil {
			cancel()
		}
		err = errors.Join(err, command.Wait())
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", name, errors.Join(err, ctx.Err()), bytes.TrimSpace(stderr))
	}
	return string(stdout), nil
}

// limit bounds the memory and the processor time of a process. SIGXCPU ends it, because the
// soft limit is below the hard one; it leaves no core file.
func limit(pid int) error {
	for resource, bound := range map[int]unix.Rlimit{
		unix.RLIMIT_AS:   {Cur: memory, Max: memory},
		unix.RLIMIT_CPU:  {Cur: processor, Max: processor + 1},
		unix.RLIMIT_CORE: {},
	} {
		// If it has exited already, it needed less.
		if err := unix.Prlimit(pid, resource, &bound, nil); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("limiting its resources: %w", err)
		}
	}
	return nil
}

// buffer keeps what a program writes, and closes the pipe of one that writes too much.
type buffer []byte

func (b *buffer) Write(p []byte) (int, error) {
	if len(*b)+len(p) > output {
		return 0, errors.New("too much output")
	}
	*b = append(*b, p...)
	return len(p), nil
}
