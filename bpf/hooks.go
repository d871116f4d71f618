package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// hook is a place where one of our programs runs. Both are held, so that the
// program can be attached again whatever becomes of link and pin.
type hook struct {
	name    string // of the pin
	attach  ebpf.AttachType
	program *ebpf.Program
	link    link.Link // nil until attached
}

// check tells whether the hook is attached to the cgroup.
func (h *hook) check(cgroup string) error {
	ok, err := attachedTo(h.link, cgroup)
	if err == nil && !ok {
		err = fmt.Errorf("%s is not attached to %s any more", h.name, cgroup)
	}
	return err
}

// mend attaches the program again if it is not attached, unless by the pinned
// link another process's is.
func (h *hook) mend(pins *pins, cgroup string) error {
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
		// Loading has shown that we are allowed to: the refusal comes from who is attached.
		return nil, fmt.Errorf("%w: %w", ErrHookOwned, err)
	case err != nil:
		return nil, unsupported(err)
	}
	return l, nil
}

// detach takes the hook's program from the cgroup, and its pin away.
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

// attachedTo tells whether l is attached to the cgroup at path.
func attachedTo(l link.Link, path string) (bool, error) {
	info, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("inspect link: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return false, fmt.Errorf("stat cgroup %s: %w", path, err)
	}
	cgroup := info.Cgroup()
	return cgroup != nil && cgroup.CgroupId == st.Ino, nil
}
