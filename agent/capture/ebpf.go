package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/uuid"

	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// ebpf redirects by the programs of package bpf.
type ebpf struct {
	bpf  *bpf.Redirect
	root string // of the cgroups that are hooked
}

func openEBPF(cfg Config) (redirector, error) {
	root := cfg.CgroupRoot
	if root == "" {
		return nil, fmt.Errorf("%w: the unified cgroup hierarchy is not known", bpf.ErrUnsupported)
	}
	if _, err := netnsCookie(); err != nil {
		return nil, fmt.Errorf("%w: %w", bpf.ErrUnsupported, err)
	}
	r, err := bpf.Open(root, cfg.PinDir)
	if err != nil {
		return nil, err
	}
	for _, lack := range r.Lacks() {
		cfg.Logger.Warn("this kernel allows less than it could", "lack", lack)
	}
	return ebpf{r, root}, nil
}

func (e ebpf) mode() Mode { return EBPF }

func (e ebpf) slow() bool { return false }

// hostNetwork asks whether the hook would know the pods' processes, and the listeners
// their connections: by cgroups that the kubelet made for them in the unified hierarchy,
// and not in others only.
func (e ebpf) hostNetwork() error {
	if err := e.bpf.HostNetwork(); err != nil {
		return err
	}
	if err := socketsTellCgroups(); err != nil {
		return err
	}
	tops, _ := filepath.Glob(filepath.Join(e.root, "kubepods*", "cgroup.events"))
	for _, top := range tops {
		if events, err := os.ReadFile(top); err == nil && strings.Contains(string(events), "populated 1") {
			return nil
		}
	}
	return fmt.Errorf("no process of a pod is in the unified cgroup hierarchy at %s, by which pods that use the node's network are told apart", e.root)
}

// entry is what is known of the pod, an earlier agent's doing included.
func (e ebpf) entry(p *Pod) (bpf.Pod, bool, error) {
	if p.hostNetwork {
		return e.bpf.Cgroup(p.cgroup)
	}
	return e.bpf.Pod(p.cookie)
}

func (e ebpf) last(p *Pod) (uint16, *egress) {
	entry, _, _ := e.entry(p)
	if entry.Egress == 0 || entry.UID != p.uid {
		return entry.Port, nil
	}
	ports, err := e.bpf.EgressPorts(p.uid)
	if err != nil || len(ports) == 0 {
		return entry.Port, nil
	}
	return entry.Port, &egress{ports: ports, port: entry.Egress}
}

func (e ebpf) canEgress() error { return e.bpf.Egress() }

func (e ebpf) origin(p *Pod, conn *net.TCPConn) (netip.AddrPort, error) {
	near, far := ends(conn)
	to, _, err := e.bpf.TakeOrigin(p.cookie, far, near.Port())
	return to, err
}

func wanted(p *Pod) bpf.Pod {
	pod := bpf.Pod{UID: p.uid, Port: p.port, Open: p.failOpen, Stalled: p.stalled}
	if p.egress != nil {
		pod.Egress = p.egress.port
	}
	return pod
}

func (e ebpf) redirect(_ context.Context, p *Pod) error {
	if p.egress != nil {
		own, err := ownAddresses(p.netns)
		if err == nil {
			err = e.bpf.SetEgress(p.uid, p.egress.ports, own)
		}
		if err != nil {
			return err
		}
	}
	var err error
	if p.hostNetwork {
		err = errors.Join(e.bpf.SetCgroup(p.cgroup, wanted(p)), e.bpf.SetHost(p.cookie))
	} else {
		err = e.bpf.SetPod(p.cookie, wanted(p))
	}
	if err == nil && p.egress == nil {
		err = e.bpf.SetEgress(p.uid, nil, nil)
	}
	return err
}

func (e ebpf) release(p *Pod) error {
	entry, ok, err := e.entry(p)
	switch {
	case err != nil || !ok || entry.Port != p.port:
		return err
	case p.hostNetwork:
		err = e.bpf.DeleteCgroup(p.cgroup)
	default:
		err = e.bpf.DeletePod(p.cookie)
	}
	return errors.Join(err, e.bpf.SetEgress(p.uid, nil, nil))
}

func (e ebpf) setFailOpen(p *Pod) error { return e.redirect(context.Background(), p) }

func (e ebpf) setDestinations(destinations []netip.AddrPort, _ []*Pod) error {
	return e.bpf.SetDestinations(destinations)
}

func (e ebpf) mark(fd int) error { return e.bpf.MarkSocket(fd) }

func (e ebpf) sweep(keep func(uid uuid.UUID) bool) error {
	return e.bpf.Sweep(func(uid [16]byte) bool { return isOwnPod(uid) && !isGone(uid) || keep(uid) })
}

func (e ebpf) beat() bool { return e.bpf.Beat() }

// check looks at the entries of pods known by their cgroups too, for a probe is
// made by a process that is in none of them, and at those of pods with egress, which
// no probe is for.
func (e ebpf) check(pods []*Pod) error {
	errs := []error{e.bpf.Check()}
	for _, p := range pods {
		if !unprobed(p) {
			continue
		}
		switch entry, ok, err := e.entry(p); {
		case err != nil:
			errs = append(errs, err)
		case !ok || entry != wanted(p):
			errs = append(errs, fmt.Errorf("the entry of pod %s is gone", p.uid))
		case p.egress != nil:
			if ok, err := e.bpf.HasEgress(p.uid, p.egress.ports); err != nil || !ok {
				errs = append(errs, errors.Join(err, fmt.Errorf("the ports of pod %s are gone", p.uid)))
			}
		}
	}
	return errors.Join(errs...)
}

func (e ebpf) repair(destinations []netip.AddrPort, pods []*Pod) error {
	errs := []error{e.bpf.Repair(), e.bpf.SetDestinations(destinations)}
	for _, p := range pods {
		if unprobed(p) {
			errs = append(errs, e.redirect(context.Background(), p))
		}
	}
	return errors.Join(errs...)
}

// unprobed reports whether probes do not cover all of a pod's redirection.
func unprobed(p *Pod) bool { return p.hostNetwork || p.egress != nil }

func (e ebpf) close([]*Pod) error { return e.bpf.Close() }
