package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// agentProgram is the agent's process name.
const agentProgram = "ctrlmesh-agent"

// process is the process of an agent on this machine.
type process struct {
	pid     int
	started time.Time
}

// agentProcess finds the agent of a pod, by the pod's uid.
func agentProcess(uid string) (*process, error) {
	pid, err := stats.ProcessOf(uid, stats.Runs(agentProgram))
	if err != nil {
		return nil, err
	}
	started, err := startTime(fmt.Sprintf("/proc/%d", pid))
	return &process{pid, started}, err
}

// startTime returns when a process started. The resolution is 10 ms: the kernel counts ticks
// of 10 ms since boot.
func startTime(dir string) (time.Time, error) {
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return time.Time{}, err
	}
	_, after, _ := strings.Cut(string(stat), ") ") // after begins with the 3rd field; the start time is the 22nd
	fields := strings.Fields(after)
	if len(fields) < 20 {
		return time.Time{}, fmt.Errorf("%s/stat is not as expected", dir)
	}
	ticks, err := strconv.ParseInt(fields[19], 10, 64)
	if err != nil {
		return time.Time{}, err
	}
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return time.Time{}, err
	}
	return time.Now().Add(time.Duration(ticks)*10*time.Millisecond - time.Duration(up.Nano())), nil
}

// atRest returns the processor time a second that the process takes while nobody sends a request.
func (p *process) atRest(ctx context.Context) (time.Duration, error) {
	if err := kube.Sleep(ctx, settle); err != nil {
		return 0, err
	}
	before, err := stats.ProcessorTime(p.pid)
	if err != nil {
		return 0, err
	}
	if err := kube.Sleep(ctx, idle); err != nil {
		return 0, err
	}
	after, err := stats.ProcessorTime(p.pid)
	return (after - before) / (idle / time.Second), err
}

// kill kills the process and waits until it has exited.
func (p *process) kill() error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		return err
	}
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
