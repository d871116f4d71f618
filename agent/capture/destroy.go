package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/sockdiag"
)

// destroyAtOnce is how many connections are destroyed at a time.
const destroyAtOnce = 4096

// noteLapse notes that the pod may have gone direct without an agent.
func (p *Pod) noteLapse() {
	p.status.direct = p.status.direct || p.known.FailOpen && p.mode == EBPF
}

// noteLoss notes that the pod's redirection had no effect: it may have gone direct, whatever
// its failure policy.
func (p *Pod) noteLoss() { p.status.direct = p.status.direct || p.mode != Address }

// endDirect ends direct connections, of as many pods as there is time for. The next check
// continues.
func (h *health) endDirect(pods []*Pod, until time.Time) {
	for i, p := range pods {
		if !p.status.direct {
			continue
		}
		if !time.Now().Before(until) {
			return
		}
		// Pods under hostNetwork share a namespace, and the cost of listing it.
		together := []*Pod{p}
		if p.known.HostNetwork && p.egress == nil {
			together = slices.DeleteFunc(slices.Clone(pods[i:]), func(other *Pod) bool {
				return !other.status.direct || !other.known.HostNetwork || other.egress != nil
			})
		}
		more := h.node.destroyDirect(h.node.destinations, p.egress.allPorts(), together...)
		for _, p := range together {
			p.status.direct = more
		}
	}
}

// destroyDirect destroys the direct connections of these pods to the destinations, and to the
// ports at any other address. The pods share a network namespace and are redirected by now:
// their clients connect again. Failures are only logged, because a pod that must not bypass
// the agent trusts the mesh CA alone. It is called under node.mu, and reports whether there
// may be more connections.
func (n *node) destroyDirect(destinations []netip.AddrPort, ports []uint16, pods ...*Pod) (more bool) {
	log := n.cfg.Logger
	if len(pods) == 1 {
		log = log.With("pod", pods[0].known.UID)
	}
	s := search{netns: pods[0].known.NetNS, shared: pods[0].known.HostNetwork, protocols: []uint8{unix.IPPROTO_TCP}}
	if len(ports) > 0 {
		s.protocols = append(s.protocols, unix.IPPROTO_UDP)
	}
	s.isDirect = n.isDirect(s.netns, destinations, ports)
	cgroups := map[uint64]bool{}
	for _, p := range pods {
		s.known += p.ownSockets()
		if p.known.Cgroup != 0 {
			cgroups[p.known.Cgroup] = true
		}
	}
	if len(cgroups) > 0 && n.cfg.CgroupRoot != "" {
		s.cgroups = func() (map[uint64]bool, error) { return cgroupsBelow(n.cfg.CgroupRoot, cgroups) }
	}
	destroyed, more, err := s.destroy()
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		n.noDestroy.Do(func() {
			log.Warn("this kernel lacks CONFIG_INET_DIAG_DESTROY: connections from before the capture continue")
		})
	case err != nil:
		log.Warn("failed to end direct connections", "error", err)
	}
	if destroyed > 0 {
		log.Info("ended direct connections", "connections", destroyed)
	}
	return more && destroyed > 0
}

// isDirect returns a function that reports whether a connection from a network namespace to
// an address bypasses the agent.
func (n *node) isDirect(namespace *os.File, destinations []netip.AddrPort, ports []uint16) func(netip.AddrPort) bool {
	var own []netip.Addr
	if len(ports) > 0 {
		own, _ = netns.Addresses(namespace) // without them, more is ended than necessary
	}
	return func(to netip.AddrPort) bool {
		if slices.Contains(destinations, to) {
			return true
		}
		return slices.Contains(ports, to.Port()) && !slices.Contains(n.destinations, to) && !to.Addr().IsLoopback() && !slices.Contains(own, to.Addr())
	}
}

// ownSockets returns how many sockets the agent has in the pod's network namespace.
func (p *Pod) ownSockets() int {
	if p.egress == nil {
		return len(p.sockets)
	}
	return len(p.sockets) + len(p.egress.sockets)
}

// search finds the direct connections in one network namespace.
type search struct {
	netns     *os.File
	known     int  // sockets of the agent there; without others, nothing is listed
	shared    bool // netns is the node's
	protocols []uint8
	isDirect  func(to netip.AddrPort) bool
	// cgroups returns the cgroups to search. If it is nil, or the kernel does not report the
	// cgroup of a connection, all are found that are not this process's own, unless netns
	// is shared.
	cgroups func() (map[uint64]bool, error)
}

// destroy destroys what it finds, and reports whether there was more than it destroys at
// once. An MPTCP connection carries no data from then on, and ends a minute later.
func (s search) destroy() (destroyed int, more bool, err error) {
	var sockets *sockdiag.Namespace
	if err := netns.Do(s.netns, func() error {
		// A pod that has just been created has none.
		if n, err := sockdiag.Count(s.protocols); err != nil || n <= s.known {
			return err
		}
		opened, err := sockdiag.Open()
		sockets = &opened
		return err
	}); err != nil {
		return 0, false, fmt.Errorf("listing the pod's connections: %w", err)
	}
	if sockets == nil {
		return 0, false, nil
	}
	defer sockets.Close()
	var cgroups map[uint64]bool
	if s.cgroups != nil {
		if cgroups, err = s.cgroups(); err != nil {
			return 0, false, err
		}
	}
	found, more, err := s.find(*sockets, cgroups)
	if err != nil || len(found) == 0 {
		return 0, false, err
	}
	destroyed, err = destroyAll(*sockets, found, cgroups)
	return destroyed, more, err
}

// find returns destroyAtOnce connections at most, and whether there are more.
func (s search) find(sockets sockdiag.Namespace, cgroups map[uint64]bool) (found []sockdiag.Connection, more bool, err error) {
	err = sockets.Each(s.protocols, func(c sockdiag.Connection) bool {
		switch {
		case c.Inode == 0, !s.isDirect(c.Remote): // closed by its process, or not direct
		case cgroups != nil && (c.Cgroup != 0 || s.shared) && !cgroups[c.Cgroup]: // an agent's, or another pod's
		case len(found) == destroyAtOnce:
			more = true
		default:
			found = append(found, c)
		}
		return true
	})
	return found, more, err
}

// destroyAll destroys connections, except this process's own. It stops if the kernel cannot
// destroy any.
func destroyAll(sockets sockdiag.Namespace, found []sockdiag.Connection, cgroups map[uint64]bool) (destroyed int, err error) {
	// Own sockets are listed last, so that one that is opened meanwhile is in neither list.
	own, err := sockdiag.Own()
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, c := range found {
		if own[c.Inode] && (cgroups == nil || c.Cgroup == 0) {
			continue
		}
		ok, err := sockets.Destroy(c)
		switch {
		case ok:
			destroyed++
		case errors.Is(err, unix.EOPNOTSUPP):
			return destroyed, err
		case err != nil:
			errs = append(errs, err)
		}
	}
	return destroyed, errors.Join(errs...)
}
