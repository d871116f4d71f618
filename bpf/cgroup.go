package bpf

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// checkCgroup returns an error unless dir is a cgroup of the unified hierarchy.
func checkCgroup(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("%w: looking for a cgroup at %s: %w", ErrUnsupported, dir, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%w: %s is not in the unified cgroup hierarchy (cgroup2)", ErrUnsupported, dir)
	}
	return nil
}
