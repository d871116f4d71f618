package capture

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/uuid"

	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// ebpf redirects by the programs of package bpf.
type ebpf struct {
	bpf *bpf.Redirect
}

func openEBPF(cfg Config) (redirector, error) {
	root := cfg.CgroupRoot
	if root == "" {
		found, err := bpf.FindCgroupRoot()
		if err != nil {
			return nil, err
		}
		root = found
	}
	if !cfg.Subtree && !bpf.IsCgroupRoot(root) {
		return nil, fmt.Errorf("%w: %s is not the root of the whole unified cgroup hierarchy", bpf.ErrUnsupported, root)
	}
	if _, err := netnsCookie(); err != nil {
		return nil, fmt.Errorf("%w: %w", bpf.ErrUnsupported, err)
	}
	r, err := bpf.Open(root, cfg.PinDir)
	if err != nil {
		return nil, err
	}
	return ebpf{r}, nil
}

func (e ebpf) mode() Mode { return EBPF }

func (e ebpf) hostNetwork() error { return errors.ErrUnsupported }

func (e ebpf) lastPort(p *Pod) uint16 {
	entry, _, _ := e.bpf.Pod(p.cookie)
	return entry.Port
}

func (e ebpf) redirect(p *Pod) error {
	return e.bpf.SetPod(p.cookie, bpf.Pod{UID: p.uid, Port: p.port})
}

func (e ebpf) release(p *Pod) error {
	entry, ok, err := e.bpf.Pod(p.cookie)
	if err != nil || !ok || entry.Port != p.port {
		return err
	}
	return e.bpf.DeletePod(p.cookie)
}

func (e ebpf) setFailOpen(*Pod) error { return nil }

func (e ebpf) setDestinations(destinations []netip.AddrPort, _ []*Pod) error {
	return e.bpf.SetDestinations(destinations)
}

func (e ebpf) mark(fd int) error {
	return e.bpf.MarkSocket(fd)
}

func (e ebpf) sweep(keep func(uid uuid.UUID) bool) error {
	entries, err := e.bpf.Pods()
	if err != nil {
		return err
	}
	var errs []error
	for cookie, entry := range entries {
		if !keep(entry.UID) {
			errs = append(errs, e.bpf.DeletePod(cookie))
		}
	}
	return errors.Join(errs...)
}

func (e ebpf) close([]*Pod) error { return e.bpf.Close() }
