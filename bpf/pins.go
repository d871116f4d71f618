package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// layout names the directory of the pins. It changes whenever a map's key,
// value or meaning does, so that no program meets a map of another layout.
const layout = "v1"

// pins is a locked directory of pinned maps and links.
type pins struct {
	dir   string
	fresh bool // nothing was pinned there
	lock  *os.File
}

// openPins makes the layout's directory under parent if need be, and keeps other processes out of it.
func openPins(parent string) (_ *pins, err error) {
	if err := checkBPFFS(parent); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return nil, fmt.Errorf("make pin directory: %w", unsupported(err))
	}
	// The parent, because the directory itself may be removed under the lock.
	lock, err := os.Open(parent)
	if err != nil {
		return nil, fmt.Errorf("open pin directory: %w", unsupported(err))
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock pin directory %s: %w", parent, err)
	}
	dir := filepath.Join(parent, layout)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make pin directory: %w", unsupported(err))
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read pin directory: %w", unsupported(err))
	}
	return &pins{dir: dir, fresh: len(entries) == 0, lock: lock}, nil
}

func (p *pins) unlock() { p.lock.Close() }

// attach makes program the one that runs at the hook, by the pinned link if there is one.
func (p *pins) attach(cgroup, name string, attach ebpf.AttachType, program *ebpf.Program) error {
	path := filepath.Join(p.dir, name)
	pinned, err := link.LoadPinnedLink(path, nil)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return p.attachAnew(cgroup, path, attach, program)
	case err != nil:
		return fmt.Errorf("open pinned link: %w", unsupported(err))
	}
	defer pinned.Close()

	same, err := attachedTo(pinned, cgroup)
	if err != nil {
		return err
	}
	if !same {
		// Ours, but elsewhere: its cgroup is gone or the root has another path now.
		return p.attachAnew(cgroup, path, attach, program)
	}
	if err := pinned.Update(program); err != nil {
		return fmt.Errorf("replace program of pinned link: %w", err)
	}
	return nil
}

// attachAnew attaches program by a new link and puts its pin in place of whatever is pinned at path.
func (p *pins) attachAnew(cgroup, path string, attach ebpf.AttachType, program *ebpf.Program) error {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: attach, Program: program})
	switch {
	case errors.Is(err, unix.EPERM):
		// Loading has shown that we are allowed to: the refusal comes from who is attached.
		return fmt.Errorf("%w: %w", ErrHookOwned, err)
	case err != nil:
		return unsupported(err)
	}
	defer l.Close()

	// The old link, if any, goes only when the new one is in force.
	next := path + "_next"
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove stale pin: %w", err)
	}
	if err := l.Pin(next); err != nil {
		return fmt.Errorf("pin link: %w", unsupported(err))
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

// attachedTo tells whether l is attached to the cgroup at path.
func attachedTo(l link.Link, path string) (bool, error) {
	info, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("inspect pinned link: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return false, fmt.Errorf("stat cgroup %s: %w", path, err)
	}
	cgroup := info.Cgroup()
	return cgroup != nil && cgroup.CgroupId == st.Ino, nil
}

// remove detaches the links and unpins everything.
func (p *pins) remove() error {
	entries, err := os.ReadDir(p.dir)
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		path := filepath.Join(p.dir, entry.Name())
		// Not a link if this fails, but a map. Unpinning detaches too, unless a process still holds the link.
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			if err := l.Detach(); err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
				errs = append(errs, fmt.Errorf("detach %s: %w", path, err))
			}
			l.Close()
		}
		if err := os.Remove(path); err != nil {
			errs = append(errs, fmt.Errorf("unpin: %w", err))
		}
	}
	if err := os.Remove(p.dir); err != nil {
		errs = append(errs, fmt.Errorf("remove pin directory: %w", err))
	}
	return errors.Join(errs...)
}

// checkBPFFS tells whether dir is, or would be if it were made, on a bpffs.
func checkBPFFS(dir string) error {
	for d := filepath.Clean(dir); ; d = filepath.Dir(d) {
		var st unix.Statfs_t
		err := unix.Statfs(d, &st)
		switch {
		case errors.Is(err, os.ErrNotExist) && d != filepath.Dir(d):
			continue
		case err != nil:
			return fmt.Errorf("look for a bpffs at %s: %w", dir, unsupported(err))
		case st.Type != unix.BPF_FS_MAGIC:
			return fmt.Errorf("%w: %s is not on a bpffs (mount -t bpf bpf /sys/fs/bpf)", ErrUnsupported, dir)
		}
		return nil
	}
}
