package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// pins is a locked directory of pinned maps and links.
type pins struct {
	parent, dir string
	fresh       bool // the directory was empty
	lock        *os.File
}

// openPins locks parent against other processes, and creates the layout's directory in it if
// it is missing.
func openPins(parent string) (_ *pins, err error) {
	if err := checkBPFFS(parent); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return nil, fmt.Errorf("creating pin directory: %w", unsupported(err))
	}
	// The parent, because the directory itself may be removed under the lock.
	lock, err := os.Open(parent)
	if err != nil {
		return nil, fmt.Errorf("opening pin directory: %w", unsupported(err))
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("locking pin directory %s: %w", parent, err)
	}
	dir := filepath.Join(parent, layout)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("creating pin directory: %w", unsupported(err))
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("reading pin directory: %w", unsupported(err))
	}
	return &pins{parent: parent, dir: dir, fresh: len(entries) == 0, lock: lock}, nil
}

func (p *pins) unlock() { p.lock.Close() }

// takeOver attaches the hook's program: by the pinned link if there is one, which replaces
// the program atomically, else by a new link.
func (p *pins) takeOver(h *hook, cgroup string) error {
	pinned, err := p.link(h.name, cgroup)
	if err != nil {
		return err
	}
	if pinned == nil {
		// An old link is unpinned only once the new one is in force.
		if h.link, err = h.attachAnew(cgroup); err != nil {
			return err
		}
		return p.pin(h.name, h.link)
	}
	h.link = pinned
	return failure.Wrap(pinned.Update(h.program), "replacing program of pinned link")
}

// link opens the pinned link of this name. It returns nil if there is none, or if it is not
// attached to the cgroup: it may have been detached, or be attached to a former root.
func (p *pins) link(name, cgroup string) (link.Link, error) {
	return pinnedLink(filepath.Join(p.dir, name), func(l link.Link) (bool, error) { return attachedTo(l, cgroup) })
}

// pinnedLink opens a pinned link. It returns nil if there is none, or if it is not attached where it should be.
func pinnedLink(path string, attached func(link.Link) (bool, error)) (link.Link, error) {
	pinned, err := link.LoadPinnedLink(path, nil)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("opening pinned link: %w", unsupported(err))
	}
	if ok, err := attached(pinned); !ok || err != nil {
		pinned.Close()
		return nil, err
	}
	return pinned, nil
}

// object can be pinned: it is a map or a link.
type object interface {
	Pin(path string) error
	Unpin() error
}

// pin pins o by this name, in place of an earlier pin.
func (p *pins) pin(name string, o object) error {
	path := filepath.Join(p.dir, name)
	next := path + "_next"
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing stale pin: %w", err)
	}
	// It may still have the path of a pin that was removed.
	if err := o.Unpin(); err != nil {
		return fmt.Errorf("removing stale pin: %w", err)
	}
	if err := o.Pin(next); err != nil {
		return fmt.Errorf("pinning %s: %w", name, unsupported(err))
	}
	return failure.Wrap(os.Rename(next, path), "pinning %s", name)
}

// checkBPFFS returns an error unless dir, which may not exist yet, is on a bpffs.
func checkBPFFS(dir string) error {
	for d := filepath.Clean(dir); ; d = filepath.Dir(d) {
		var st unix.Statfs_t
		err := unix.Statfs(d, &st)
		switch {
		case errors.Is(err, os.ErrNotExist) && d != filepath.Dir(d):
			continue
		case err != nil:
			return fmt.Errorf("looking for a bpffs at %s: %w", dir, unsupported(err))
		case st.Type != unix.BPF_FS_MAGIC:
			return fmt.Errorf("%w: %s is not on a bpffs (mount -t bpf bpf /sys/fs/bpf)", ErrUnsupported, dir)
		}
		return nil
	}
}

// options opens the maps that are pinned in the directory, and pins new ones there.
func (p *pins) options() *ebpf.CollectionOptions {
	return &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: p.dir}}
}
