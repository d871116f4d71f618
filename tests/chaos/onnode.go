package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// onNodeCommand makes this program do one thing in the namespaces of a node and
// end: `chaos on-node detach DIR`. It is how BPF is spoken there.
const onNodeCommand = "on-node"

func onNode(args []string) error {
	if len(args) < 2 {
		return errors.New("on-node detach|empty|inventory DIR, or left CGROUP IDS, or foreign UID")
	}
	switch command, args := args[0], args[1:]; command {
	case "detach":
		return detach(args[0])
	case "empty":
		return empty(args[0], args[1:])
	case "inventory":
		i, err := takeInventory(args[0])
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(i)
	case "left":
		return printLeft(args[0], args[1])
	case "foreign":
		return printForeign(args[0])
	default:
		return fmt.Errorf("on-node %s?", command)
	}
}

// inventory are the ids, in the kernel, of what is pinned below a directory.
type inventory struct {
	Links    []link.ID
	Programs []ebpf.ProgramID
	Maps     []ebpf.MapID
}

// pinned calls visit for everything that is pinned below dir.
func pinned(dir string, visit func(path string) error) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return visit(path)
	})
}

func takeInventory(dir string) (inv inventory, err error) {
	err = pinned(dir, func(path string) error {
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			defer l.Close()
			info, err := l.Info()
			if err != nil {
				return fmt.Errorf("looking at link %s: %w", path, err)
			}
			inv.Links = append(inv.Links, info.ID)
			inv.Programs = append(inv.Programs, info.Program)
			return nil
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("%s is neither a link nor a map: %w", path, err)
		}
		defer m.Close()
		info, err := m.Info()
		if err != nil {
			return fmt.Errorf("looking at map %s: %w", path, err)
		}
		if id, ok := info.ID(); ok {
			inv.Maps = append(inv.Maps, id)
		}
		return nil
	})
	return inv, err
}

// detach takes every pinned link's program off its hook, as somebody else with the
// right to do so could.
func detach(dir string) error {
	n := 0
	err := pinned(dir, func(path string) error {
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return nil // a map
		}
		defer l.Close()
		if err := l.Detach(); err != nil {
			return fmt.Errorf("detaching %s: %w", path, err)
		}
		n++
		return nil
	})
	if err == nil && n == 0 {
		err = errors.New("no link is pinned in " + dir)
	}
	return err
}

// empty deletes all entries of the pinned maps of some names.
func empty(dir string, names []string) error {
	n := 0
	err := pinned(dir, func(path string) error {
		if !slices.Contains(names, filepath.Base(path)) {
			return nil
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("opening map %s: %w", path, err)
		}
		defer m.Close()
		for {
			key, err := m.NextKeyBytes(nil)
			if err != nil {
				return fmt.Errorf("reading map %s: %w", path, err)
			}
			if key == nil {
				return nil
			}
			if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("emptying map %s: %w", path, err)
			}
			n++
		}
	})
	if err == nil && n == 0 {
		err = fmt.Errorf("no entries in %v", names)
	}
	return err
}

// printLeft prints what is still there of an inventory, and what is attached to a cgroup.
func printLeft(cgroup, text string) error {
	var inv inventory
	if err := json.Unmarshal([]byte(text), &inv); err != nil {
		return fmt.Errorf("reading the inventory: %w", err)
	}
	for _, id := range inv.Links {
		if l, err := link.NewFromID(id); err == nil {
			fmt.Println("link", id)
			_ = l.Close()
		}
	}
	for _, id := range inv.Programs {
		if p, err := ebpf.NewProgramFromID(id); err == nil {
			fmt.Println("program", id, p)
			_ = p.Close()
		}
	}
	for _, id := range inv.Maps {
		if m, err := ebpf.NewMapFromID(id); err == nil {
			fmt.Println("map", id, m)
			_ = m.Close()
		}
	}
	root, err := os.Open(cgroup)
	if err != nil {
		return fmt.Errorf("opening the cgroup: %w", err)
	}
	defer root.Close()
	for _, attach := range []ebpf.AttachType{
		ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect, ebpf.AttachCgroupInet4GetPeername,
		ebpf.AttachCgroupInet6GetPeername, ebpf.AttachCGroupSockOps, ebpf.AttachCgroupInetSockRelease,
	} {
		programs, err := link.QueryPrograms(link.QueryOptions{Target: int(root.Fd()), Attach: attach})
		if err != nil {
			return fmt.Errorf("asking what is attached to %s: %w", cgroup, err)
		}
		for _, p := range programs.Programs {
			fmt.Println("attached", attach, p.ID)
		}
	}
	return nil
}

// printForeign prints the TCP sockets in a pod's network namespace that belong to
// no process in it, and stay: the pod's own come and go between two looks.
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

// foreign are the sockets of a network namespace without those of its processes, by inode.
func foreign(netns string) (map[string]string, error) {
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	own, inside := map[string]bool{}, ""
	for _, p := range processes {
		if ns, err := os.Readlink(p + "/ns/net"); err != nil || ns != netns {
			continue // gone, or elsewhere
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
			// sl local remote state ... inode: 0 of one that nobody holds any more
			fields := strings.Fields(line)
			if len(fields) < 10 || fields[0] == "sl" || fields[9] == "0" || own["socket:["+fields[9]+"]"] {
				continue
			}
			out[fields[9]] = strings.Join([]string{table, "socket", fields[1], fields[2], "state", fields[3]}, " ")
		}
	}
	return out, nil
}

// netnsOf is the network namespace of a pod, found by its cgroup.
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
