// Package ebpf captures pods by the programs of package bpf.
package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/sockdiag"
	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// Backend redirects in the connect hooks of a cgroup.
type Backend struct {
	*bpf.Redirect
	root string // of the cgroups that are hooked
}

// Open loads and attaches the programs. Their warnings are logged by warn.
func Open(root, pinDir string, warn func(msg string, args ...any)) (*Backend, error) {
	if root == "" {
		return nil, fmt.Errorf("%w: the unified cgroup hierarchy is not known", bpf.ErrUnsupported)
	}
	if _, err := netns.Cookie(); err != nil {
		return nil, fmt.Errorf("%w: %w", bpf.ErrUnsupported, err)
	}
	r, err := bpf.Open(root, pinDir)
	if err != nil {
		return nil, err
	}
	for _, lack := range r.Lacks() {
		warn("this kernel lacks a feature that capture uses", "lack", lack)
	}
	return &Backend{r, root}, nil
}

// HostNetwork returns why pods under hostNetwork cannot be captured, nil if they can. The
// hook must know their processes, and the listeners their connections: by cgroups that the
// kubelet created in the unified hierarchy, and not in others only.
func (b *Backend) HostNetwork() error {
	if err := b.Redirect.HostNetwork(); err != nil {
		return err
	}
	if err := sockdiag.CheckCgroups(); err != nil {
		return err
	}
	tops, _ := filepath.Glob(filepath.Join(b.root, "kubepods*", "cgroup.events"))
	for _, top := range tops {
		if events, err := os.ReadFile(top); err == nil && strings.Contains(string(events), "populated 1") {
			return nil
		}
	}
	return fmt.Errorf("no process of a pod is in the unified cgroup hierarchy at %s, which identifies pods that use the node's network", b.root)
}

// keyOf returns the key of the pod's entry, which may be an earlier agent's.
func keyOf(p redirect.Pod) bpf.Key {
	if p.HostNetwork {
		return bpf.ByCgroup(p.Cgroup)
	}
	return bpf.ByCookie(p.Cookie)
}

// Left returns the entry of the pod, which may be an earlier agent's.
func (b *Backend) Left(_ context.Context, p redirect.Pod) redirect.Left {
	entry, _, _ := b.Pod(keyOf(p))
	l := redirect.Left{Port: entry.Port}
	if entry.Egress == 0 || entry.UID != p.UID {
		return l
	}
	if ports, err := b.EgressPorts(p.UID); err == nil && len(ports) > 0 {
		l.Egress = &redirect.Egress{Ports: ports, Port: entry.Egress}
	}
	return l
}

// Origin returns the address that a redirected connection was made to.
func (b *Backend) Origin(cookie uint64, _ *net.TCPConn, local, remote netip.AddrPort) (netip.AddrPort, error) {
	to, _, err := b.TakeOrigin(cookie, remote, local.Port())
	return to, err
}

func wanted(p redirect.Pod) bpf.Pod {
	pod := bpf.Pod{UID: p.UID, Port: p.Port, Open: p.FailOpen, Stalled: p.Stalled}
	if p.Egress != nil {
		pod.Egress = p.Egress.Port
	}
	return pod
}

// Apply redirects the pod.
func (b *Backend) Apply(_ context.Context, p redirect.Pod) error {
	if p.Egress != nil {
		own, err := netns.Addresses(p.NetNS)
		if err == nil {
			err = b.SetEgress(p.UID, p.Egress.Ports, own)
		}
		if err != nil {
			return err
		}
	}
	err := b.SetPod(keyOf(p), wanted(p))
	if p.HostNetwork {
		err = errors.Join(err, b.SetHost(p.Cookie))
	}
	if err == nil && p.Egress == nil {
		err = b.SetEgress(p.UID, nil, nil)
	}
	return err
}

// Release ends the redirection, unless it leads to another agent.
func (b *Backend) Release(p redirect.Pod) error {
	entry, ok, err := b.Pod(keyOf(p))
	if err != nil || !ok || entry.Port != p.Port {
		return err
	}
	return errors.Join(b.DeletePod(keyOf(p)), b.SetEgress(p.UID, nil, nil))
}

// SetDestinations changes the destinations for all pods.
func (b *Backend) SetDestinations(destinations []netip.AddrPort, _ []redirect.Pod) (redirect.Failed, error) {
	return nil, b.Redirect.SetDestinations(destinations)
}

// unprobed reports whether probes do not cover all of a pod's redirection. A probe is made
// by a process in none of the pods' cgroups, and to no other host than the apiserver.
func unprobed(p redirect.Pod) bool { return p.HostNetwork || p.Egress != nil }

// State returns always the same while the pod's entry is as it was made. All else that redirects the pod's
// connections, a probe of the agent's own pod covers.
func (b *Backend) State(p redirect.Pod) (state uint32, known bool) {
	entry, ok, err := b.Pod(keyOf(p))
	return 0, err == nil && ok && entry == wanted(p)
}

// Check returns what a probe of these pods does not show.
func (b *Backend) Check(pods []redirect.Pod) (redirect.Failed, error) {
	errs := []error{b.Redirect.Check()}
	for _, p := range pods {
		if !unprobed(p) {
			continue
		}
		switch entry, ok, err := b.Pod(keyOf(p)); {
		case err != nil:
			errs = append(errs, err)
		case !ok || entry != wanted(p):
			errs = append(errs, fmt.Errorf("the entry of pod %s was deleted", p.UID))
		case p.Egress != nil:
			if ok, err := b.HasEgress(p.UID, p.Egress.Ports); err != nil || !ok {
				errs = append(errs, errors.Join(err, fmt.Errorf("the ports of pod %s were deleted", p.UID)))
			}
		}
	}
	return nil, errors.Join(errs...)
}

// Repair restores what the pods share, and what Check finds of them.
func (b *Backend) Repair(destinations []netip.AddrPort, pods []redirect.Pod) error {
	errs := []error{b.Redirect.Repair(), b.Redirect.SetDestinations(destinations)}
	for _, p := range pods {
		if unprobed(p) {
			errs = append(errs, b.Apply(context.Background(), p))
		}
	}
	return errors.Join(errs...)
}

// Close detaches from the programs, which stay.
func (b *Backend) Close([]redirect.Pod) error { return b.Redirect.Close() }
