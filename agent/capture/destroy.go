package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// What linux/sock_diag.h and linux/inet_diag.h say.
const (
	sockDestroy      = 21
	inetDiagCgroupID = 21
	sizeofDiagID     = 48 // struct inet_diag_sockid
	sizeofDiagMsg    = 72 // struct inet_diag_msg
)

// comeBack is for a pod that may have gone direct for want of an agent.
func (p *Pod) comeBack() {
	p.direct = p.direct || p.failOpen && p.way.mode() == EBPF
}

// recaptured is for a pod whose redirection was lost and is mended: what it
// connected meanwhile went direct, whatever its failure policy.
func (p *Pod) recaptured() {
	p.direct = p.direct || p.way.mode() != Address
}

// endDirect ends the connections around the agent, for as many pods as there is
// time for. The others are the next check's.
func (n *node) endDirect(pods []*Pod, until time.Time) {
	for i, p := range pods {
		if !p.direct {
			continue
		}
		if !time.Now().Before(until) {
			return
		}
		// Those under hostNetwork share a namespace, and all it takes to look there.
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

// destroyDirect destroys the connections to the destinations, and to the ports anywhere
// else, that these pods, which share a network namespace, made around the agent, and which are
// redirected by now: whoever made them connects again. What fails is logged: a
// pod that must not go around the agent trusts nobody else anyway. It is called
// under node.mu, and tells whether there may be more of them.
func (n *node) destroyDirect(destinations []netip.AddrPort, ports []uint16, pods ...*Pod) (more bool) {
	log := n.cfg.Logger
	if len(pods) == 1 {
		log = log.With("pod", pods[0].uid)
	}
	known, cgroups := 0, map[uint64]bool{}
	for _, p := range pods {
		known += len(p.sockets)
		if p.egress != nil {
			known += len(p.egress.sockets)
		}
		if p.cgroup != 0 {
			cgroups[p.cgroup] = true
		}
	}
	shared := pods[0].hostNetwork
	wanted := make(map[netip.AddrPort]bool, len(destinations))
	for _, d := range destinations {
		wanted[d] = true
	}
	var own []netip.Addr
	if len(ports) > 0 {
		own, _ = ownAddresses(pods[0].netns) // without them, more is ended than need be
	}
	isDirect := func(to netip.AddrPort) bool {
		return wanted[to] || slices.Contains(ports, to.Port()) && !slices.Contains(n.destinations, to) && !to.Addr().IsLoopback() && !slices.Contains(own, to.Addr())
	}
	protocols := []uint8{unix.IPPROTO_TCP}
	if len(ports) > 0 {
		protocols = append(protocols, unix.IPPROTO_UDP)
	}
	destroyed, more, err := destroy(pods[0].netns, known, shared, protocols, isDirect, func() (map[uint64]bool, error) {
		if len(cgroups) == 0 || n.cfg.CgroupRoot == "" {
			return nil, nil
		}
		return cgroupsBelow(n.cfg.CgroupRoot, cgroups)
	})
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

// destroyAtOnce is how many connections are destroyed at a time.
const destroyAtOnce = 4096

// destroy destroys the connections by these protocols in netns that are direct: those of the
// cgroups, where the kernel says whose they are. Where it does not, or if cgroups
// are not known, all that are not this process's own, unless netns is shared. One by MPTCP can carry
// nothing from then on, and ends a minute later. No more sockets than known
// means none to look for. There may be more of them than are destroyed at once.
func destroy(netns *os.File, known int, shared bool, protocols []uint8, isDirect func(to netip.AddrPort) bool, cgroups func() (map[uint64]bool, error)) (destroyed int, more bool, err error) {
	var socket *nl.NetlinkSocket
	if err := inNetNS(netns, func() error {
		// To list them, the kernel walks through those of the whole node. A pod that
		// has only just been made has none.
		if n, err := countSockets(protocols); err != nil || n <= known {
			return err
		}
		socket, err = nl.Subscribe(unix.NETLINK_INET_DIAG)
		return err
	}); err != nil {
		return 0, false, fmt.Errorf("ask for the pod's connections: %w", err)
	}
	if socket == nil {
		return 0, false, nil
	}
	defer socket.Close()
	execute := func(request *nl.NetlinkRequest, each func(message []byte)) error {
		request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_INET_DIAG: {Socket: socket}}
		return request.ExecuteIter(unix.NETLINK_INET_DIAG, 0, func(message []byte) bool {
			each(message)
			return true
		})
	}

	only, err := cgroups()
	if err != nil {
		return 0, false, err
	}
	var found []connection
	for i := range 2 * len(protocols) {
		family, protocol := []uint8{unix.AF_INET, unix.AF_INET6}[i%2], protocols[i/2]
		request := nl.NewNetlinkRequest(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		request.AddRawData(diagRequest(protocol, family, [sizeofDiagID]byte{}))
		if err := execute(request, func(message []byte) {
			c, ok := parseConnection(message)
			c.protocol = protocol
			switch {
			case !ok, c.inode == 0, !isDirect(c.remote): // closed by whoever made it, or going elsewhere
			case only != nil && (c.cgroup != 0 || shared) && !only[c.cgroup]: // an agent's, or a stranger's
			case len(found) == destroyAtOnce:
				more = true
			default:
				found = append(found, c)
			}
		}); err != nil && (protocol != unix.IPPROTO_UDP || !errors.Is(err, unix.ENOENT)) { // a kernel that does not tell
			return 0, false, fmt.Errorf("list the pod's connections: %w", err)
		}
	}
	if len(found) == 0 {
		return 0, false, nil
	}

	// Own sockets are looked for after all others: one that came in between is in neither.
	own, err := ownSockets()
	if err != nil {
		return 0, false, err
	}
	var errs []error
	for _, c := range found {
		if own[c.inode] && (only == nil || c.cgroup == 0) {
			continue
		}
		request := nl.NewNetlinkRequest(sockDestroy, unix.NLM_F_ACK)
		request.AddRawData(diagRequest(c.protocol, c.family, c.id))
		switch err := execute(request, func([]byte) {}); {
		case err == nil:
			destroyed++
		case errors.Is(err, unix.EOPNOTSUPP):
			return destroyed, false, err // so it will be of all
		case !errors.Is(err, unix.ENOENT):
			errs = append(errs, fmt.Errorf("destroy the connection to %s: %w", c.remote, err))
		}
	}
	return destroyed, more, errors.Join(errs...)
}

// countSockets is how many sockets listen, connect or are connected in the calling
// thread's network namespace.
func countSockets(protocols []uint8) (int, error) {
	formats := map[string][]string{"sockstat": {"TCP: inuse %d"}, "sockstat6": {"TCP6: inuse %d"}}
	if slices.Contains(protocols, unix.IPPROTO_UDP) {
		formats = map[string][]string{"sockstat": {"TCP: inuse %d", "UDP: inuse %d"}, "sockstat6": {"TCP6: inuse %d", "UDP6: inuse %d"}}
	}
	sum := 0
	for file, formats := range formats {
		stat, err := os.ReadFile("/proc/thread-self/net/" + file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(stat)) {
			for _, format := range formats {
				var n int
				if _, err := fmt.Sscanf(line, format, &n); err == nil {
					sum += n
				}
			}
		}
	}
	return sum, nil
}

// connection is what the kernel says of a socket.
type connection struct {
	family   uint8
	protocol uint8
	id       [sizeofDiagID]byte // by which it can be named
	remote   netip.AddrPort
	inode    uint32 // 0 if no process has it
	cgroup   uint64 // 0 if it is not said
}

// diagRequest is a struct inet_diag_req_v2 for connections that carry data, or may.
func diagRequest(protocol, family uint8, id [sizeofDiagID]byte) []byte {
	const listen, timeWait, newSynRecv = 10, 6, 12
	b := []byte{family, protocol, 0, 0}
	b = binary.NativeEndian.AppendUint32(b, ^uint32(1<<listen|1<<timeWait|1<<newSynRecv))
	return append(b, id[:]...)
}

// parseConnection reads a struct inet_diag_msg.
func parseConnection(message []byte) (c connection, ok bool) {
	if len(message) < sizeofDiagMsg {
		return c, false
	}
	c.family = message[0]
	copy(c.id[:], message[4:])
	port, remote := binary.BigEndian.Uint16(c.id[2:]), c.id[20:36]
	switch c.family {
	case unix.AF_INET:
		c.remote = netip.AddrPortFrom(netip.AddrFrom4([4]byte(remote)), port)
	case unix.AF_INET6:
		c.remote = netip.AddrPortFrom(netip.AddrFrom16([16]byte(remote)).Unmap(), port)
	default:
		return c, false
	}
	c.inode = binary.NativeEndian.Uint32(message[68:])
	attributes, err := nl.ParseRouteAttr(message[sizeofDiagMsg:])
	if err != nil {
		return c, false
	}
	for _, a := range attributes {
		if a.Attr.Type == inetDiagCgroupID && len(a.Value) == 8 {
			c.cgroup = binary.NativeEndian.Uint64(a.Value)
		}
	}
	return c, true
}

// ownSockets are the inodes of this process's sockets.
func ownSockets() (map[uint32]bool, error) {
	const dir = "/proc/self/fd"
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list own sockets: %w", err)
	}
	own := map[uint32]bool{}
	for _, f := range files {
		to, err := os.Readlink(filepath.Join(dir, f.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		if number, ok := strings.CutPrefix(to, "socket:["); ok {
			inode, err := strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 32)
			if err != nil {
				return nil, fmt.Errorf("list own sockets: %w", err)
			}
			own[uint32(inode)] = true
		}
	}
	return own, nil
}

// cgroupsBelow are the ids of these cgroups and of all below them.
func cgroupsBelow(root string, tops map[uint64]bool) (map[uint64]bool, error) {
	ids := map[uint64]bool{}
	var below string // of the one that is being walked through
	err := walkCgroups(root, func(path string, id uint64) error {
		inside := below != "" && strings.HasPrefix(path, below)
		if !inside && tops[id] {
			below, inside = path+string(filepath.Separator), true
		}
		if inside {
			ids[id] = true
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return ids, nil
}
