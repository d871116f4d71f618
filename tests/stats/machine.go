package stats

import (
	"os"
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

// Load returns the load averages of the machine over one, five and fifteen minutes.
func Load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	return strings.Join(strings.Fields(string(b))[:3], " ")
}
