package stats

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ProcessOf returns the process of a pod that accepts, by the pod's uid. accept gets the directory of a process
// in /proc.
func ProcessOf(uid string, accept func(dir string) bool) (pid int, err error) {
	if uid == "" {
		return 0, errors.New("no process of no pod") // every control group contains ""
	}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	for _, dir := range dirs {
		groups, err := os.ReadFile(dir + "/cgroup")
		if err == nil && strings.Contains(string(groups), uid) && accept(dir) {
			return strconv.Atoi(filepath.Base(dir))
		}
	}
	return 0, fmt.Errorf("no process of pod %s", uid)
}

// Runs returns whether a process runs a program, by the first 15 bytes of the program's name. It is for [ProcessOf].
func Runs(program string) func(dir string) bool {
	return func(dir string) bool {
		name, err := os.ReadFile(dir + "/comm")
		return err == nil && strings.TrimSpace(string(name)) == program
	}
}

// Join moves the calling process into the control group of another.
func Join(pid int) error {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return err
	}
	root := "/sys/fs/cgroup/unified"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	for line := range strings.Lines(string(groups)) {
		if group, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return os.WriteFile(filepath.Join(root, group, "cgroup.procs"), strconv.AppendInt(nil, int64(unix.Getpid()), 10), 0)
		}
	}
	return fmt.Errorf("process %d has no control group of version 2", pid)
}
