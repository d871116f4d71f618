package onnode

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// printForeign prints the TCP sockets in a pod's network namespace that belong to none of its
// processes. It looks twice, because the pod's own sockets come and go while it looks.
func printForeign(uid string) error {
	netns, err := netnsOf(uid)
	if err != nil {
		return err
	}
	before, err := foreign(netns)
	if err != nil {
		return err
	}
	time.Sleep(300 * time.Millisecond)
	after, err := foreign(netns)
	if err != nil {
		return err
	}
	for inode, socket := range after {
		if before[inode] != "" {
			fmt.Println(socket)
		}
	}
	return nil
}

// foreign returns the sockets of a network namespace that belong to none of its processes, by
// inode.
func foreign(netns string) (map[string]string, error) {
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	own, inside := map[string]bool{}, ""
	for _, p := range processes {
		if ns, err := os.Readlink(p + "/ns/net"); err != nil || ns != netns {
			continue // exited, or in another namespace
		}
		inside = p
		fds, _ := os.ReadDir(p + "/fd")
		for _, fd := range fds {
			if target, err := os.Readlink(p + "/fd/" + fd.Name()); err == nil {
				own[target] = true
			}
		}
	}
	out := map[string]string{}
	for _, table := range []string{"tcp", "tcp6"} {
		text, err := os.ReadFile(filepath.Join(inside, "net", table))
		if err != nil {
			return nil, fmt.Errorf("reading the sockets of the pod: %w", err)
		}
		for line := range strings.Lines(string(text)) {
			// sl local remote state ... inode; 0 if no process has it open
			fields := strings.Fields(line)
			if len(fields) < 10 || fields[0] == "sl" || fields[9] == "0" || own["socket:["+fields[9]+"]"] {
				continue
			}
			out[fields[9]] = strings.Join([]string{table, "socket", fields[1], fields[2], "state", fields[3]}, " ")
		}
	}
	return out, nil
}

// netnsOf returns the network namespace of a pod, which it finds by its cgroup.
func netnsOf(uid string) (string, error) {
	groups, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		return "", err
	}
	for _, path := range groups {
		text, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(text), "pod"+uid) {
			continue
		}
		if ns, err := os.Readlink(filepath.Join(filepath.Dir(path), "ns", "net")); err == nil {
			return ns, nil
		}
	}
	return "", fmt.Errorf("no process of pod %s", uid)
}
