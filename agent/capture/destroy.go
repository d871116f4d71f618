package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/sockdiag"
)

// destroyAtOnce is how many connections are destroyed at a time.
const destroyAtOnce = 4096

// comeBack notes that the pod may have gone direct for want of an agent.
func (p *Pod) comeBack() {
	p.direct = p.direct || p.failOpen && p.redirector.mode() == EBPF
}

// recaptured notes that the pod's redirection was lost and is repaired: what it connected
// meanwhile went direct, whatever its failure policy.
func (p *Pod) recaptured() {
	p.direct = p.direct || p.redirector.mode() != Address
}

// endDirect ends the connections around the agent, of as many pods as there is time for.
// The next check continues.
func (n *node) endDirect(pods []*Pod, until time.Time) {
	for i, p := range pods {
		if !p.direct {
			continue
		}
		if !time.Now().Before(until) {
			return
		}
		// Pods under hostNetwork share a namespace, and the cost of looking there.
		together := []*Pod{p}
		if p.hostNetwork && p.egress == nil {
			together = slices.DeleteFunc(slices.Clone(pods[i:]), func(other *Pod) bool {
				return !other.direct || !other.hostNetwork || other.egress != nil
			})
		}
		more := n.destroyDirect(n.destinations, p.egress.allPorts(), together...)
		for _, p := range together {
			p.direct = more
		}
	}
}

// destroyDirect destroys the connections to the destinations, and to the ports at any other
// address, that these pods made around the agent. The pods share a network namespace and
// are redirected by now: their clients connect again. Failures are logged, because a pod
// that must not go around the agent trusts nobody else anyway. It is called under node.mu,
// and reports whether there may be more connections.
func (n *node) destroyDirect(destinations []netip.AddrPort, ports []uint16, pods ...*Pod) (more bool) {
	log := n.cfg.Logger
	if len(pods) == 1 {
		log = log.With("pod", pods[0].uid)
	}
	s := search{netns: pods[0].netns, shared: pods[0].hostNetwork, protocols: []uint8{unix.IPPROTO_TCP}}
	if len(ports) > 0 {
		s.protocols = append(s.protocols, unix.IPPROTO_UDP)
	}
	s.isDirect = n.isDirect(s.netns, destinations, ports)
	cgroups := map[uint64]bool{}
	for _, p := range pods {
		s.known += p.ownSockets()
		if p.cgroup != 0 {
			cgroups[p.cgroup] = true
		}
	}
	if len(cgroups) > 0 && n.cfg.CgroupRoot != "" {
		s.cgroups = func() (map[uint64]bool, error) { return cgroupsBelow(n.cfg.CgroupRoot, cgroups) }
	}
	destroyed, more, err := s.destroy()
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		n.noDestroy.Do(func() {
			log.Warn("this kernel (CONFIG_INET_DIAG_DESTROY) does not end connections that pods made before they were captured")
		})
	case err != nil:
		log.Warn("connections that went around the agent may go on", "error", err)
	}
	if destroyed > 0 {
		log.Info("ended connections that went around the agent", "connections", destroyed)
	}
	return more && destroyed > 0
}

// isDirect returns a function that reports whether a connection from netns to an address
// goes around the agent.
func (n *node) isDirect(netns *os.File, destinations []netip.AddrPort, ports []uint16) func(netip.AddrPort) bool {
	redirected := make(map[netip.AddrPort]bool, len(destinations))
	for _, d := range destinations {
		redirected[d] = true
	}
	var own []netip.Addr
	if len(ports) > 0 {
		own, _ = ownAddresses(netns) // without them, more is ended than necessary
	}
	return func(to netip.AddrPort) bool {
		if redirected[to] {
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

// search is for the connections in one network namespace that go around the agent.
type search struct {
	netns     *os.File
	known     int  // sockets of the agent there; if there are no others, the search is over
	shared    bool // netns is the node's
	protocols []uint8
	isDirect  func(to netip.AddrPort) bool
	// cgroups returns the cgroups whose connections are meant. If it is nil, or for
	// connections of which the kernel does not say the cgroup, all are meant that are not
	// this process's own, unless netns is shared.
	cgroups func() (map[uint64]bool, error)
}

// destroy destroys what it finds, and reports whether there was more than it destroys at
// once. A connection by MPTCP can carry nothing from then on, and ends a minute later.
func (s search) destroy() (destroyed int, more bool, err error) {
	var sockets *sockdiag.Namespace
	if err := inNetNS(s.netns, func() error {
		// A pod that was created a moment ago has none.
		if n, err := sockdiag.Count(s.protocols); err != nil || n <= s.known {
			return err
		}
		opened, err := sockdiag.Open()
		sockets = &opened
		return err
	}); err != nil {
		return 0, false, fmt.Errorf("ask for the pod's connections: %w", err)
	}
	if sockets == nil {
		return 0, false, nil
	}
	defer sockets.Close()
	var meant map[uint64]bool
	if s.cgroups != nil {
		if meant, err = s.cgroups(); err != nil {
			return 0, false, err
		}
	}
	found, more, err := s.find(*sockets, meant)
	if err != nil || len(found) == 0 {
		return 0, false, err
	}
	destroyed, err = destroyAll(*sockets, found, meant)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return destroyed, false, err
	}
	return destroyed, more, err
}

// find returns destroyAtOnce connections at most, and whether there are more.
func (s search) find(sockets sockdiag.Namespace, meant map[uint64]bool) (found []sockdiag.Connection, more bool, err error) {
	err = sockets.Each(s.protocols, func(c sockdiag.Connection) {
		switch {
		case c.Inode == 0, !s.isDirect(c.Remote): // closed by its process, or not direct
		case meant != nil && (c.Cgroup != 0 || s.shared) && !meant[c.Cgroup]: // an agent's, or another pod's
		case len(found) == destroyAtOnce:
			more = true
		default:
			found = append(found, c)
		}
	})
	return found, more, err
}

// destroyAll destroys connections, except this process's own. It stops if the kernel cannot
// destroy any.
func destroyAll(sockets sockdiag.Namespace, found []sockdiag.Connection, meant map[uint64]bool) (destroyed int, err error) {
	// Own sockets are listed after all others, so that one that was opened in between is in
	// neither list.
	own, err := sockdiag.Own()
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, c := range found {
		if own[c.Inode] && (meant == nil || c.Cgroup == 0) {
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
