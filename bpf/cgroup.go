package bpf

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// rootInode is the inode number of the true root of a cgroup hierarchy. The
// root of a private cgroup namespace looks like a root in every other way.
const rootInode = 1

// FindCgroupRoot returns where the root of the unified cgroup hierarchy is
// mounted: /sys/fs/cgroup, on hybrid nodes a directory below it. The mount of a
// container's private cgroup namespace does not count, for it shows no more
// than that container. The error is an [ErrUnsupported].
func FindCgroupRoot() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("%w: look for the cgroup root: %w", ErrUnsupported, err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		mount, kind, ok := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(mount)
		if ok && len(fields) > 4 && strings.HasPrefix(kind, "cgroup2 ") && IsCgroupRoot(fields[4]) {
			return fields[4], nil
		}
	}
	return "", fmt.Errorf("%w: the root of the unified cgroup hierarchy (cgroup2) is not mounted", ErrUnsupported)
}

// IsCgroupRoot tells whether dir is the root of the whole unified cgroup
// hierarchy, and not of a part of it.
func IsCgroupRoot(dir string) bool {
	var st unix.Stat_t
	return checkCgroup(dir) == nil && unix.Stat(dir, &st) == nil && st.Ino == rootInode
}

// checkCgroup tells whether dir is a cgroup of the unified hierarchy.
func checkCgroup(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("%w: look for a cgroup at %s: %w", ErrUnsupported, dir, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%w: %s is not in the unified cgroup hierarchy (cgroup2)", ErrUnsupported, dir)
	}
	return nil
}
