package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// hook is an attach point and our program there. The program stays loaded, so that it can
// be attached again if link and pin are removed.
type hook struct {
	name    string // of the program, and of the pin
	attach  ebpf.AttachType
	program *ebpf.Program // nil until loaded
	link    link.Link     // nil until attached
}

// check returns an error unless the hook is attached to the cgroup.
func (h *hook) check(cgroup string) error {
	ok, err := attachedTo(h.link, cgroup)
	if err == nil && !ok {
		err = fmt.Errorf("%s is no longer attached to %s", h.name, cgroup)
	}
	return err
}

// repair attaches the program again if it is not attached. If the pinned link is attached,
// which another process then did, the hook uses that link.
func (h *hook) repair(pins *pins, cgroup string) error {
	if ok, err := attachedTo(h.link, cgroup); ok || err != nil {
		return err
	}
	if pins != nil {
		pinned, err := pins.link(h.name, cgroup)
		if err != nil {
			return err
		}
		if pinned != nil {
			h.link.Close()
			h.link = pinned
			return nil
		}
	}
	l, err := h.attachAnew(cgroup)
	if err != nil {
		return err
	}
	h.link.Close()
	h.link = l
	if pins == nil {
		return nil
	}
	return pins.pin(h.name, l)
}

// attachAnew attaches the program by a new link.
func (h *hook) attachAnew(cgroup string) (link.Link, error) {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: h.attach, Program: h.program})
	switch {
	case errors.Is(err, unix.EPERM):
		// Loading has shown that we have the permission: an exclusive program is attached.
		return nil, fmt.Errorf("%w: %w", ErrHookOwned, err)
	case err != nil:
		return nil, unsupported(err)
	}
	return l, nil
}

// detach detaches the program from the cgroup and removes its pin.
func (h *hook) detach() error {
	if h.link == nil {
		return nil
	}
	return errors.Join(h.link.Unpin(), h.link.Detach())
}

func (h *hook) close() error {
	err := h.program.Close()
	if h.link != nil {
		err = errors.Join(err, h.link.Close())
	}
	return err
}

// attachedTo reports whether l is attached to the cgroup at path.
func attachedTo(l link.Link, path string) (bool, error) {
	info, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("inspecting link: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return false, fmt.Errorf("looking for cgroup %s: %w", path, err)
	}
	cgroup := info.Cgroup()
	return cgroup != nil && cgroup.CgroupId == st.Ino, nil
}
