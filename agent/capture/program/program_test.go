package program_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/program"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/program/programtest"
)

const (
	memoryInKiB = 64 << 10
	output      = 64 << 10
)

// limited is a script that prints its memory limit once it has one.
const limited = `while [ "$(ulimit -v)" = unlimited ]; do sleep 0.01; done; ulimit -v`

func TestRunBoundsMemoryAndOutput(t *testing.T) {
	out, err := program.Run(t.Context(), "", "sh", "-c", limited)
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintln(memoryInKiB), out)
	_, err = program.Run(t.Context(), "", "head", "-c", fmt.Sprint(output+1), "/dev/zero")
	require.Error(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err = program.Run(ctx, "", "sleep", "60")
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// sh runs a script in a shell under its bounded name.
func sh(script string, args ...string) (stdout, stderr string, status int, took time.Duration) {
	var out, complaint strings.Builder
	command := exec.Command("sh"+program.Suffix, append([]string{"-c", script, "sh"}, args...)...)
	command.Stdout, command.Stderr = &out, &complaint
	start := time.Now()
	err := command.Run()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		status = exit.ExitCode()
	}
	return out.String(), complaint.String(), status, time.Since(start)
}

func TestBoundedNameRunsProgramWithBounds(t *testing.T) {
	programtest.Link(t, "sh")
	const killed = 125
	for name, test := range map[string]struct {
		script         string
		args           []string
		stdout, stderr string
		status         int
		atLeast        time.Duration
	}{
		"output and arguments":  {script: `echo "$@"`, args: []string{"-t", "nat"}, stdout: "-t nat\n"},
		"status":                {script: "echo no chain >&2; exit 1", stderr: "no chain", status: 1},
		"memory":                {script: limited, stdout: fmt.Sprintln(memoryInKiB)},
		"output up to bound":    {script: fmt.Sprintf("head -c %d /dev/zero", output), stdout: strings.Repeat("\x00", output)},
		"output above bound":    {script: fmt.Sprintf("head -c %d /dev/zero", output+1), stderr: "too much output", status: killed},
		"complaint above bound": {script: fmt.Sprintf("head -c %d /dev/zero >&2", output+1), stderr: "too much output", status: killed},
		"signal":                {script: "kill -9 $$", stderr: "killed", status: killed},
		"time":                  {script: "exec sleep 60", args: []string{"--wait", "1"}, stderr: "deadline exceeded", status: killed, atLeast: time.Second},
		"output kept open":      {script: "sleep 60 & exit 0", stderr: "WaitDelay", status: killed},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, status, took := sh(test.script, test.args...)
			require.Equal(t, test.status, status, stderr)
			require.Equal(t, test.stdout, stdout)
			require.Contains(t, stderr, test.stderr)
			require.Greater(t, took, test.atLeast)
		})
	}
}

func TestBoundedNameOfMissingProgram(t *testing.T) {
	programtest.Link(t, "sh")
	path, err := exec.LookPath("sh" + program.Suffix)
	require.NoError(t, err)
	t.Setenv("PATH", "")
	err = exec.Command(path).Run()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 125, exit.ExitCode(), "it must not look like a missing chain")
}
