package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// What linux/sock_diag.h and linux/inet_diag.h say.
const (
	sockDestroy      = 21
	inetDiagCgroupID = 21
	sizeofDiagID     = 48 // struct inet_diag_sockid
	sizeofDiagMsg    = 72 // struct inet_diag_msg
)

// destroyDirect destroys the pod's connections to the destinations, which are
// redirected by now, but were made around the agent: whoever made them connects
// again. What fails is logged: a pod that must not go around the agent trusts
// nobody else anyway. It is called under node.mu.
func (p *Pod) destroyDirect() {
	log := p.node.cfg.Logger.With("pod", p.uid)
	destroyed, err := destroy(p.netns, len(p.sockets), p.node.destinations, func() (map[uint64]bool, error) {
		if p.cgroup == 0 {
			return nil, nil
		}
		return cgroupsBelow(p.node.cfg.CgroupRoot, p.cgroup)
	})
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		p.node.noDestroy.Do(func() {
			log.Warn("this kernel (CONFIG_INET_DIAG_DESTROY) does not end connections that pods made before they were captured")
		})
	case err != nil:
		log.Warn("connections that the pod made before it was captured may go on", "error", err)
	}
	if destroyed > 0 {
		log.Info("ended connections that the pod had made before it was captured", "connections", destroyed)
	}
}

// destroy destroys the TCP connections to the destinations in netns that are
// not this process's own. If cgroups returns any, they must be of those. One by
// MPTCP can carry nothing from then on, and ends a minute later. No more sockets
// than known means none to look for.
func destroy(netns *os.File, known int, destinations []netip.AddrPort, cgroups func() (map[uint64]bool, error)) (destroyed int, err error) {
	var socket *nl.NetlinkSocket
	if err := inNetNS(netns, func() error {
		// To list them, the kernel walks through those of the whole node. A pod that
		// has only just been made has none.
		if n, err := countSockets(); err != nil || n <= known {
			return err
		}
		socket, err = nl.Subscribe(unix.NETLINK_INET_DIAG)
		return err
	}); err != nil {
		return 0, fmt.Errorf("ask for the pod's connections: %w", err)
	}
	if socket == nil {
		return 0, nil
	}
	defer socket.Close()
	execute := func(request *nl.NetlinkRequest, each func(message []byte)) error {
		request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_INET_DIAG: {Socket: socket}}
		return request.ExecuteIter(unix.NETLINK_INET_DIAG, 0, func(message []byte) bool {
			each(message)
			return true
		})
	}

	wanted := map[netip.AddrPort]bool{}
	for _, d := range destinations {
		wanted[d] = true
	}
	var found []connection
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		request := nl.NewNetlinkRequest(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		request.AddRawData(diagRequest(family, [sizeofDiagID]byte{}))
		if err := execute(request, func(message []byte) {
			if c, ok := parseConnection(message); ok && wanted[c.remote] {
				found = append(found, c)
			}
		}); err != nil {
			return 0, fmt.Errorf("list the pod's connections: %w", err)
		}
	}
	if len(found) == 0 {
		return 0, nil
	}

	// Own sockets are looked for after all others: one that came in between is in neither.
	own, err := ownSockets()
	if err != nil {
		return 0, err
	}
	only, err := cgroups()
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, c := range found {
		if c.inode == 0 || own[c.inode] || only != nil && !only[c.cgroup] {
			continue // closed by whoever made it, or ours, or a stranger's
		}
		request := nl.NewNetlinkRequest(sockDestroy, unix.NLM_F_ACK)
		request.AddRawData(diagRequest(c.family, c.id))
		switch err := execute(request, func([]byte) {}); {
		case err == nil:
			destroyed++
		case errors.Is(err, unix.EOPNOTSUPP):
			return destroyed, err // so it will be of all
		case !errors.Is(err, unix.ENOENT):
			errs = append(errs, fmt.Errorf("destroy the connection to %s: %w", c.remote, err))
		}
	}
	return destroyed, errors.Join(errs...)
}

// countSockets is how many TCP sockets listen, connect or are connected in the
// calling thread's network namespace.
func countSockets() (int, error) {
	sum := 0
	for file, format := range map[string]string{"sockstat": "TCP: inuse %d", "sockstat6": "TCP6: inuse %d"} {
		stat, err := os.ReadFile("/proc/thread-self/net/" + file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(stat)) {
			var n int
			if _, err := fmt.Sscanf(line, format, &n); err == nil {
				sum += n
			}
		}
	}
	return sum, nil
}

// connection is what the kernel says of a TCP socket.
type connection struct {
	family uint8
	id     [sizeofDiagID]byte // by which it can be named
	remote netip.AddrPort
	inode  uint32 // 0 if no process has it
	cgroup uint64 // 0 if it is not said
}

// diagRequest is a struct inet_diag_req_v2 for connections that carry data, or may.
func diagRequest(family uint8, id [sizeofDiagID]byte) []byte {
	const listen, timeWait, newSynRecv = 10, 6, 12
	b := []byte{family, unix.IPPROTO_TCP, 0, 0}
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

// cgroupsBelow are the ids of the cgroup with this id and of all below it.
func cgroupsBelow(root string, id uint64) (map[uint64]bool, error) {
	if root == "" {
		found, err := bpf.FindCgroupRoot()
		if err != nil {
			return nil, err
		}
		root = found
	}
	ids := map[uint64]bool{}
	top := ""
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && !entry.IsDir() {
			return nil
		}
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return nil //nolint:nilerr // gone meanwhile
		}
		inode := info.Sys().(*syscall.Stat_t).Ino
		if inode == id {
			top = path + string(filepath.Separator)
		}
		if top != "" && strings.HasPrefix(path+string(filepath.Separator), top) {
			ids[inode] = true
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for the pod's cgroups: %w", err)
	}
	return ids, nil
}
