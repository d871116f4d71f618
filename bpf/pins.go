package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// pins is a locked directory of pinned maps and links.
type pins struct {
	parent, dir string
	fresh       bool // nothing was pinned there
	lock        *os.File
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
	return &pins{parent: parent, dir: dir, fresh: len(entries) == 0, lock: lock}, nil
}

func (p *pins) unlock() { p.lock.Close() }

// takeOver makes the hook's program the one that runs, by the pinned link if there is one.
func (p *pins) takeOver(h *hook, cgroup string) error {
	pinned, err := p.link(h.name, cgroup)
	if err != nil {
		return err
	}
	if pinned == nil {
		// The old link, if any, goes only when the new one is in force.
		if h.link, err = h.attachAnew(cgroup); err != nil {
			return err
		}
		return p.pin(h.name, h.link)
	}
	h.link = pinned
	if err := pinned.Update(h.program); err != nil {
		return fmt.Errorf("replace program of pinned link: %w", err)
	}
	return nil
}

// link opens the link of this name, nil if there is none that is attached to the
// cgroup: it may have been detached, or be at what was the root once.
func (p *pins) link(name, cgroup string) (link.Link, error) {
	pinned, err := link.LoadPinnedLink(filepath.Join(p.dir, name), nil)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("open pinned link: %w", unsupported(err))
	}
	attached, err := attachedTo(pinned, cgroup)
	if !attached || err != nil {
		pinned.Close()
		return nil, err
	}
	return pinned, nil
}

// object is what can be pinned: a map, a link.
type object interface {
	Pin(path string) error
	Unpin() error
}

// pin puts the pin of o in place of whatever is pinned by this name.
func (p *pins) pin(name string, o object) error {
	path := filepath.Join(p.dir, name)
	next := path + "_next"
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove stale pin: %w", err)
	}
	// It may believe to be pinned where it no longer is.
	if err := o.Unpin(); err != nil {
		return fmt.Errorf("remove stale pin: %w", err)
	}
	if err := o.Pin(next); err != nil {
		return fmt.Errorf("pin %s: %w", name, unsupported(err))
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("pin %s: %w", name, err)
	}
	return nil
}

// isPinned tells whether something is pinned in dir by this name.
func isPinned(dir, name string) bool {
	_, err := os.Lstat(filepath.Join(dir, name))
	return err == nil
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
