package stats

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ProcessorTime returns the processor time that a process has used, user and system. The
// clock of the process has nanoseconds, where /proc/PID/stat counts ticks of 10 ms.
func ProcessorTime(pid int) (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(int32(^pid<<3|2), &t) // see clock_getcpuclockid(3)
	return time.Duration(t.Nano()), err
}

// Memory is the memory of a process in bytes. File is the part of Resident that is backed by files, such
// as the program itself.
type Memory struct{ Resident, File, Peak int64 }

// MemoryOf returns the memory of a process.
func MemoryOf(pid int) (m Memory, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(status)) {
		name, rest, _ := strings.Cut(line, ":")
		to, ok := map[string]*int64{"VmRSS": &m.Resident, "RssFile": &m.File, "VmHWM": &m.Peak}[name]
		if !ok {
			continue
		}
		kibibytes, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			return m, err
		}
		*to = kibibytes * 1024
	}
	if m.Resident == 0 {
		return m, fmt.Errorf("process %d has ended", pid)
	}
	return m, nil
}

// Load returns the load averages of the machine over one, five and fifteen minutes.
func Load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	return strings.Join(strings.Fields(string(b))[:3], " ")
}
