package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
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
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		comm, err := os.ReadFile(dir + "/comm")
		if err != nil || strings.TrimSpace(string(comm)) != agentProgram {
			continue
		}
		cgroup, err := os.ReadFile(dir + "/cgroup")
		if err != nil || !strings.Contains(string(cgroup), uid) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			return nil, err
		}
		started, err := startTime(dir)
		return &process{pid, started}, err
	}
	return nil, fmt.Errorf("no process of pod %s", uid)
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
