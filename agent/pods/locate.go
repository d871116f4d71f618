package pods

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Locator finds the network namespaces of pods in the node's unified cgroup hierarchy: the
// kubelet names a pod's cgroup by its uid, with either cgroup driver and any runtime.
type Locator struct {
	cgroupRoot string // mount of the unified hierarchy
	procDir    string // the node's /proc
	own        uint64 // inode of this process's netns
	host       uint64 // inode of the node's netns
}

// NewLocator returns a Locator for a mount of the node's unified cgroup
// hierarchy and a /proc that shows the node's processes.
func NewLocator(cgroupRoot, procDir string) (*Locator, error) {
	if tops, _ := filepath.Glob(filepath.Join(cgroupRoot, "kubepods*")); len(tops) == 0 {
		return nil, fmt.Errorf("no pods below %s: it is not the node's cgroup hierarchy", cgroupRoot)
	}
	own, err := inode(os.Stat(filepath.Join(procDir, "self/ns/net")))
	if err != nil {
		return nil, fmt.Errorf("reading this process's network namespace: %w", err)
	}
	host, err := inode(os.Stat(filepath.Join(procDir, "1/ns/net")))
	if err != nil {
		return nil, fmt.Errorf("reading the node's network namespace (is hostPID set, and SYS_PTRACE granted?): %w", err)
	}
	return &Locator{cgroupRoot: cgroupRoot, procDir: procDir, own: own, host: host}, nil
}

// NetNS is an open network namespace of a pod.
type NetNS struct {
	// Inode identifies the namespace as long as it exists.
	Inode uint64
	// PID is the process of the pod by which it was found.
	PID  int
	file *os.File
}

// Path returns a path of the namespace that is valid until Close.
func (n *NetNS) Path() string { return fmt.Sprintf("/proc/self/fd/%d", n.file.Fd()) }

// Close closes the namespace, unless n is nil.
func (n *NetNS) Close() {
	if n != nil {
		_ = n.file.Close()
	}
}

// Found is what was found of a pod on the node.
type Found struct {
	// PIDs are processes of the pod; none between two containers of a pod without
	// a sandbox process.
	PIDs []int
	// Cgroup is the id of the pod's cgroup in the unified hierarchy.
	Cgroup uint64
}

// Find returns what the node has of these pods, by uid. It omits pods without a cgroup.
func (l *Locator) Find(uids map[string]bool) (map[string]Found, error) {
	if len(uids) == 0 {
		return nil, nil
	}
	return l.find(func(uid string) bool { return uids[uid] })
}

// All returns what the node has of all pods, by uid.
func (l *Locator) All() (map[string]Found, error) {
	return l.find(func(string) bool { return true })
}

// Processes returns the pids of a pod's containers, without its sandbox. sandbox is its name in
// the runtime; if that is empty, the sandbox is found by its process. There are none if it is not
// found, or if the runtime runs containers in a virtual machine.
func (l *Locator) Processes(uid, sandbox string) ([]int, error) {
	var pids []int
	err := l.walk(func(is string) bool { return is == uid }, func(_, path string) {
		is := func(name string) bool { return strings.Contains(name, sandbox) }
		if sandbox == "" {
			found := l.sandbox(path)
			if found == "" {
				return
			}
			is = func(name string) bool { return name == found }
		}
		pids = append(pids, processesBelow(path, is)...)
	})
	return pids, err
}

// Owns reports whether a process is in the cgroup of a pod now. It fails if the process has
// exited.
func (l *Locator) Owns(uid string, pid int) (bool, error) {
	cgroups, err := os.ReadFile(filepath.Join(l.procDir, strconv.Itoa(pid), "cgroup"))
	return err == nil && namesPod(string(cgroups), uid), err
}

// sandboxPrograms are what runs in sandboxes: the second in OpenShift's, the first in all others.
var sandboxPrograms = []string{"/pause", "/usr/bin/pod"}

// maxProcesses bounds the processes of a pod among which its sandbox is looked for.
const maxProcesses = 256

// sandbox returns the name of the cgroup of a pod's sandbox, given the pod's. It is that of the
// pod's oldest process, if no other is in it and its program is one of sandboxes. Some runtimes
// have no process for a sandbox. Then, or if it is not certain, the name is "".
func (l *Locator) sandbox(pod string) (name string) {
	containers, err := os.ReadDir(pod)
	if err != nil {
		return ""
	}
	oldest, count := uint64(math.MaxUint64), 0
	for _, c := range containers {
		if !c.IsDir() {
			continue
		}
		pids := processesBelow(filepath.Join(pod, c.Name()), nil)
		if count += len(pids); count > maxProcesses {
			return ""
		}
		for _, pid := range pids {
			dir := filepath.Join(l.procDir, strconv.Itoa(pid))
			stat, err := os.ReadFile(filepath.Join(dir, "stat"))
			if exited(err) {
				continue
			}
			since, startErr := start(stat)
			if err != nil || startErr != nil {
				return ""
			}
			if since > oldest {
				continue
			}
			if since == oldest {
				name = ""
				continue
			}
			oldest, name = since, ""
			program, _ := os.Readlink(filepath.Join(dir, "exe"))
			if len(pids) == 1 && slices.Contains(sandboxPrograms, program) {
				name = c.Name()
			}
		}
	}
	return name
}

func (l *Locator) find(want func(uid string) bool) (map[string]Found, error) {
	found := map[string]Found{}
	err := l.walk(want, func(uid, path string) {
		id, _ := inode(os.Stat(path)) // the id of a cgroup is its directory's inode
		found[uid] = Found{PIDs: processesBelow(path, nil), Cgroup: id}
	})
	return found, err
}

// walk calls visit for the cgroups of the pods that are wanted.
func (l *Locator) walk(want func(uid string) bool, visit func(uid, path string)) error {
	tops, err := filepath.Glob(filepath.Join(l.cgroupRoot, "kubepods*"))
	if err != nil {
		return fmt.Errorf("listing pod cgroups: %w", err)
	}
	for _, top := range tops {
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			// Pods are created and deleted while the tree is walked.
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || !d.IsDir() {
				return err
			}
			uid := podUID(d.Name())
			if uid == "" {
				return nil
			}
			if want(uid) {
				visit(uid, path)
			}
			return fs.SkipDir
		})
		if err != nil {
			return fmt.Errorf("walking pod cgroups: %w", err)
		}
	}
	return nil
}

// Open returns the network namespace of a pod, given some of its processes: the one whose
// inode is captured, as long as any of them is in it, whatever namespaces others have
// created. Else it is that of the oldest process, because a pod's sandbox starts before its
// containers and does not leave its namespace.
//
// It returns nil without an error if none of them is in a namespace of the pod: a process
// that is in the node's, though the pod does not use the node's network, will enter the
// pod's later.
func (l *Locator) Open(uid string, pids []int, hostNetwork bool, captured uint64) (*NetNS, error) {
	var oldest *NetNS
	var since uint64
	for _, pid := range pids {
		ns, started, err := l.open(uid, pid)
		switch {
		case err != nil:
			oldest.Close()
			return nil, fmt.Errorf("finding the network namespace of pod %s: %w", uid, err)
		case ns == nil:
		case (ns.Inode == l.host || ns.Inode == l.own) != hostNetwork:
			ns.Close()
		case ns.Inode == captured:
			oldest.Close()
			return ns, nil
		case oldest == nil || started < since:
			oldest.Close()
			oldest, since = ns, started
		default:
			ns.Close()
		}
	}
	return oldest, nil
}

// Process is a process that was found in a network namespace.
type Process struct {
	is    func() bool // in the namespace
	pidfd *os.File    // nil before Linux 5.3, and if no descriptor is free
}

// Hold returns the process in the network namespace of that inode; nil if it is not there any more.
func (l *Locator) Hold(pid int, netns uint64) *Process {
	path := filepath.Join(l.procDir, strconv.Itoa(pid), "ns/net")
	p := &Process{is: func() bool {
		ino, err := inode(os.Stat(path))
		return err == nil && ino == netns
	}}
	// Open first, check afterwards: see open.
	if fd, err := unix.PidfdOpen(pid, 0); err == nil {
		p.pidfd = os.NewFile(uintptr(fd), "pidfd")
	}
	if !p.is() {
		_ = p.pidfd.Close()
		return nil
	}
	return p
}

// Runs reports whether the process runs; nil does not.
func (p *Process) Runs() bool { return Running([]*Process{p})[0] }

// Running returns which of the processes run. A pod gets another sandbox only when none of its processes
// runs, and to ask about those of all pods takes about as long as looking up one namespace.
func Running(processes []*Process) []bool {
	fds := make([]unix.PollFd, len(processes))
	for i, p := range processes {
		fds[i] = unix.PollFd{Fd: -1, Events: unix.POLLIN}
		if p != nil && p.pidfd != nil {
			fds[i].Fd = int32(p.pidfd.Fd())
		}
	}
	_, err := unix.Poll(fds, 0)
	for errors.Is(err, unix.EINTR) {
		_, err = unix.Poll(fds, 0)
	}
	running := make([]bool, len(processes))
	for i, p := range processes {
		switch {
		case p == nil:
		case p.pidfd == nil:
			running[i] = p.is()
		default:
			running[i] = err == nil && fds[i].Revents == 0
		}
	}
	return running
}

// open returns the network namespace of a process of a pod, and when the process started;
// nil if it has exited.
func (l *Locator) open(uid string, pid int) (ns *NetNS, started uint64, err error) {
	dir := filepath.Join(l.procDir, strconv.Itoa(pid))
	file, err := os.Open(filepath.Join(dir, "ns/net"))
	if exited(err) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	ns = &NetNS{PID: pid, file: file}
	ns.Inode, err = inode(file.Stat())
	var cgroups, stat []byte
	// Open first, check afterwards: a pid that was reused in between belongs to another
	// cgroup now.
	if err == nil {
		cgroups, err = os.ReadFile(filepath.Join(dir, "cgroup"))
	}
	if err == nil {
		stat, err = os.ReadFile(filepath.Join(dir, "stat"))
	}
	if err == nil && namesPod(string(cgroups), uid) {
		if started, err = start(stat); err == nil {
			return ns, started, nil
		}
	}
	ns.Close()
	if exited(err) {
		err = nil
	}
	return nil, 0, err
}

// exited reports whether an error means that a process has exited.
func exited(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// start returns when a process started, in ticks since the node booted, by its
// /proc/PID/stat.
func start(stat []byte) (uint64, error) {
	// The second field is a name in parentheses, which may contain parentheses.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return 0, errors.New("/proc/PID/stat is too short")
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// podUID returns the uid in the name of a pod's cgroup: "pod<uid>" of the
// cgroupfs driver or "kubepods-<class>-pod<uid with underscores>.slice" of
// systemd's. It returns "" for other names.
func podUID(dir string) string {
	if name, ok := strings.CutSuffix(dir, ".slice"); ok {
		_, uid, _ := strings.Cut(name, "-pod")
		return strings.ReplaceAll(uid, "_", "-")
	}
	if uid, ok := strings.CutPrefix(dir, "pod"); ok {
		return uid
	}
	return ""
}

func namesPod(cgroups, uid string) bool {
	return strings.Contains(cgroups, "pod"+uid) ||
		strings.Contains(cgroups, "pod"+strings.ReplaceAll(uid, "-", "_"))
}

// processesBelow returns the processes of a cgroup and of all below it, except those whose
// names except reports; nil: none.
func processesBelow(dir string, except func(name string) bool) []int {
	var pids []int
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		if except != nil && path != dir && except(d.Name()) {
			return fs.SkipDir
		}
		procs, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if err != nil {
			return nil
		}
		for line := range strings.FieldsSeq(string(procs)) {
			if pid, err := strconv.Atoi(line); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
}

// inode returns the inode number of a file whose information was read.
func inode(info fs.FileInfo, err error) (uint64, error) {
	if err != nil {
		return 0, err
	}
	return info.Sys().(*syscall.Stat_t).Ino, nil // what it is on Linux
}

// FindUnified returns the mount of the unified cgroup hierarchy at dir, or at
// dir/unified on nodes that run both hierarchies.
func FindUnified(dir string) (string, error) {
	for _, path := range []string{dir, filepath.Join(dir, "unified")} {
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return path, nil
		}
	}
	return "", fmt.Errorf("no unified cgroup hierarchy at %s or %s/unified: mount the node's /sys/fs/cgroup there", dir, dir)
}
