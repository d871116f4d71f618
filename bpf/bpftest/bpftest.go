// Package bpftest gives tests that attach BPF programs a cgroup and a bpffs of
// their own. Their programs see no other process of the machine, and are removed.
package bpftest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

var (
	cgroup string
	reason error // why there is none
)

// Main runs a package's tests in a cgroup of their own. Call it in TestMain: the hooks of a
// socket are those of the cgroup in which it was created.
func Main(m *testing.M) {
	leave, err := enter()
	reason = err
	code := m.Run()
	if err := leave(); err != nil {
		fmt.Fprintln(os.Stderr, "leaving the test's cgroup:", err)
		code = 1
	}
	os.Exit(code)
}

// Cgroup returns the cgroup of this process, which no other process is in. It needs root
// and a kernel that package bpf supports.
func Cgroup(t testing.TB) string {
	t.Helper()
	supported(t)
	if reason != nil {
		t.Fatalf("creating the cgroup of the test: %v", reason)
	}
	return cgroup
}

func supported(t testing.TB) {
	t.Helper()
	needs.Root(t, "attaches BPF programs")
	needs.Kernel(t, 5, 14, "what package bpf supports")
}

// BPFFS mounts a bpffs until the test ends, which removes all pins in it. It needs what
// Cgroup needs.
func BPFFS(t testing.TB) string {
	t.Helper()
	supported(t)
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		t.Fatalf("mounting a bpffs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount bpffs: %v", err)
		}
	})
	return dir
}

func enter() (leave func() error, err error) {
	none := func() error { return nil }
	root, err := findCgroupRoot()
	if err != nil {
		return none, err
	}
	cgroup = filepath.Join(root, fmt.Sprintf("ctrlmesh-test-%d", os.Getpid()))
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		return none, err
	}
	if err := join(cgroup); err != nil {
		os.Remove(cgroup)
		return none, err
	}
	return func() error {
		if err := join(root); err != nil {
			return err
		}
		return remove(cgroup)
	}, nil
}

// MakeCgroup creates a cgroup until the test ends. No process may be left in it then.
func MakeCgroup(t testing.TB, dir string) {
	t.Helper()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remove(dir); err != nil {
			t.Error(err)
		}
	})
}

// remove removes a cgroup. It retries for 30 s, because processes that exited in it count for
// a moment longer.
func remove(cgroup string) error {
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		if err := os.Remove(cgroup); !errors.Is(err, unix.EBUSY) || time.Since(start) > 30*time.Second {
			return err
		}
	}
}

// findCgroupRoot returns where the unified cgroup hierarchy is mounted:
// /sys/fs/cgroup, or a directory below it where both hierarchies are in use.
func findCgroupRoot() (string, error) {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return dir, nil
		}
	}
	return "", errors.New("cgroup2 is not mounted")
}

func join(cgroup string) error {
	return os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
}
