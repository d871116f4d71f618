// Package sockdiag asks the kernel for TCP and UDP sockets (NETLINK_INET_DIAG), and destroys
// them.
package sockdiag

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Constants of linux/sock_diag.h and linux/inet_diag.h.
const (
	sockDestroy      = 21
	inetDiagInfo     = 2
	inetDiagCgroupID = 21
	sizeofDiagID     = 48 // struct inet_diag_sockid
	sizeofDiagMsg    = 72 // struct inet_diag_msg
)

// Connection is what the kernel reports about a socket.
type Connection struct {
	Local  netip.AddrPort
	Remote netip.AddrPort
	Inode  uint32 // 0 if no process has it open
	Cgroup uint64 // 0 if the kernel does not report it

	family   uint8
	protocol uint8
	id       [sizeofDiagID]byte
	info     []byte // struct tcp_info, if it was asked for
}

// Activity is when a TCP connection last carried data.
type Activity struct {
	Sent, Received time.Duration // ago
	Unread, Unsent bool          // data waits to be read or sent; not that of which the receipt is unconfirmed
}

// Find returns a socket in the calling thread's network namespace: that of the TCP
// connection with these ends, or else one that listens at local.
func Find(local, remote netip.AddrPort) (found Connection, err error) {
	family := uint8(unix.AF_INET)
	if local.Addr().Is6() {
		family = unix.AF_INET6
	}
	var id [sizeofDiagID]byte
	binary.BigEndian.PutUint16(id[0:], local.Port())
	binary.BigEndian.PutUint16(id[2:], remote.Port())
	copy(id[4:], local.Addr().AsSlice())
	copy(id[20:], remote.Addr().AsSlice())
	binary.NativeEndian.PutUint64(id[40:], ^uint64(0)) // any cookie
	request := nl.NewNetlinkRequest(unix.SOCK_DIAG_BY_FAMILY, 0)
	request.AddRawData(diagRequest(unix.IPPROTO_TCP, family, id))
	ok := false
	err = request.ExecuteIter(unix.NETLINK_INET_DIAG, 0, func(message []byte) bool {
		found, ok = parse(message)
		return true
	})
	if err == nil && !ok {
		err = fs.ErrNotExist
	}
	return found, err
}

// Namespace asks for the sockets of one network namespace.
type Namespace struct{ socket *nl.NetlinkSocket }

// Open returns the Namespace of the calling thread. It can be used by any thread.
func Open() (Namespace, error) {
	socket, err := nl.Subscribe(unix.NETLINK_INET_DIAG)
	return Namespace{socket}, err
}

// Close closes the netlink socket.
func (n Namespace) Close() { n.socket.Close() }

// Each calls f for each connection by these protocols that carries data, or may later, until f
// returns false. The kernel would still send the others then: only Close may follow.
func (n Namespace) Each(protocols []uint8, f func(Connection) (more bool)) error {
	for _, protocol := range protocols {
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			request := nl.NewNetlinkRequest(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
			request.AddRawData(diagRequest(protocol, family, [sizeofDiagID]byte{}))
			more := true
			err := n.execute(request, func(message []byte) bool {
				if c, ok := parse(message); ok {
					c.protocol = protocol
					more = f(c)
				}
				return more
			})
			if !more {
				return nil
			}
			if protocol == unix.IPPROTO_UDP && errors.Is(err, unix.ENOENT) {
				continue // this kernel does not list UDP
			}
			if err != nil {
				return fmt.Errorf("listing the pod's connections: %w", err)
			}
		}
	}
	return nil
}

// Activity returns the activity of a TCP connection. ok is false if it has ended.
func (n Namespace) Activity(c Connection) (a Activity, ok bool, err error) {
	request := nl.NewNetlinkRequest(unix.SOCK_DIAG_BY_FAMILY, 0)
	b := diagRequest(c.protocol, c.family, c.id)
	b[2] = 1 << (inetDiagInfo - 1)
	request.AddRawData(b)
	err = n.execute(request, func(message []byte) bool {
		if now, parsed := parse(message); parsed {
			a, ok = now.activity(message)
		}
		return true
	})
	if errors.Is(err, unix.ENOENT) {
		return a, false, nil
	}
	return a, ok, failure.Wrap(err, "reading the state of the connection to %s", c.Remote)
}

// activity reads the queue of a struct inet_diag_msg and the times of its struct tcp_info, of
// Linux 4.6 or later.
func (c Connection) activity(message []byte) (a Activity, ok bool) {
	const receiveQueue, lastSent, lastReceived, notSent = 56, 44, 52, 144
	if len(c.info) < notSent+4 {
		return a, false
	}
	word := func(b []byte, at int) uint32 { return binary.NativeEndian.Uint32(b[at:]) }
	return Activity{
		Sent:     time.Duration(word(c.info, lastSent)) * time.Millisecond,
		Received: time.Duration(word(c.info, lastReceived)) * time.Millisecond,
		Unread:   word(message, receiveQueue) > 0,
		Unsent:   word(c.info, notSent) > 0,
	}, true
}

// Destroy ends a connection. The error is EOPNOTSUPP if the kernel cannot do so for any, nil
// with false if the connection has ended by itself.
func (n Namespace) Destroy(c Connection) (destroyed bool, err error) {
	request := nl.NewNetlinkRequest(sockDestroy, unix.NLM_F_ACK)
	request.AddRawData(diagRequest(c.protocol, c.family, c.id))
	switch err := n.execute(request, func([]byte) bool { return true }); {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return false, err
	case !errors.Is(err, unix.ENOENT):
		return false, fmt.Errorf("destroying the connection to %s: %w", c.Remote, err)
	}
	return false, nil
}

func (n Namespace) execute(request *nl.NetlinkRequest, each func(message []byte) (more bool)) error {
	request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_INET_DIAG: {Socket: n.socket}}
	return request.ExecuteIter(unix.NETLINK_INET_DIAG, 0, each)
}

// Count returns how many sockets listen, connect or are connected in the calling thread's
// network namespace. It is much cheaper than Each, for which the kernel walks through the
// sockets of the whole node.
func Count(protocols []uint8) (int, error) {
	names := []string{"TCP"}
	if slices.Contains(protocols, unix.IPPROTO_UDP) {
		names = append(names, "UDP")
	}
	sum := 0
	for file, version := range map[string]string{"sockstat": "", "sockstat6": "6"} {
		stat, err := os.ReadFile("/proc/thread-self/net/" + file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(stat)) {
			for _, name := range names {
				var n int
				if _, err := fmt.Sscanf(line, name+version+": inuse %d", &n); err == nil {
					sum += n
				}
			}
		}
	}
	return sum, nil
}

// Own returns the inodes of this process's sockets.
func Own() (map[uint32]bool, error) {
	const dir = "/proc/self/fd"
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("listing own sockets: %w", err)
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
				return nil, fmt.Errorf("listing own sockets: %w", err)
			}
			own[uint32(inode)] = true
		}
	}
	return own, nil
}

// diagRequest returns a struct inet_diag_req_v2 for connections that carry data, or may.
func diagRequest(protocol, family uint8, id [sizeofDiagID]byte) []byte {
	const listen, timeWait, newSynRecv = 10, 6, 12
	b := []byte{family, protocol, 0, 0}
	b = binary.NativeEndian.AppendUint32(b, ^uint32(1<<listen|1<<timeWait|1<<newSynRecv))
	return append(b, id[:]...)
}

// parse reads a struct inet_diag_msg.
func parse(message []byte) (c Connection, ok bool) {
	if len(message) < sizeofDiagMsg {
		return c, false
	}
	c.family = message[0]
	copy(c.id[:], message[4:])
	if c.family != unix.AF_INET && c.family != unix.AF_INET6 {
		return c, false
	}
	c.Local, c.Remote = c.end(0, 4), c.end(2, 20)
	c.Inode = binary.NativeEndian.Uint32(message[68:])
	attributes, err := nl.ParseRouteAttr(message[sizeofDiagMsg:])
	if err != nil {
		return c, false
	}
	for _, a := range attributes {
		switch {
		case a.Attr.Type == inetDiagCgroupID && len(a.Value) == 8:
			c.Cgroup = binary.NativeEndian.Uint64(a.Value)
		case a.Attr.Type == inetDiagInfo:
			c.info = a.Value
		}
	}
	return c, true
}

// end returns the port and address at two offsets of the id.
func (c *Connection) end(port, address int) netip.AddrPort {
	a := netip.AddrFrom16([16]byte(c.id[address:])).Unmap()
	if c.family == unix.AF_INET {
		a = netip.AddrFrom4([4]byte(c.id[address:]))
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(c.id[port:]))
}

// ErrNoCgroups means that the kernel does not report in which cgroup a socket was made.
var ErrNoCgroups = errors.New("the kernel does not report the cgroup of a socket: this requires Linux 5.9 with CONFIG_SOCK_CGROUP_DATA")

// CheckCgroups returns an error if the kernel does not report in which cgroup a socket was
// made.
func CheckCgroups() error {
	var config net.ListenConfig
	config.SetMultipathTCP(false) // or it would have another protocol
	l, err := config.Listen(context.Background(), "tcp4", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("asking for the cgroup of a socket: %w", err)
	}
	defer l.Close()
	local := l.Addr().(*net.TCPAddr).AddrPort() // what this network is
	found, err := Find(local, netip.AddrPortFrom(local.Addr(), 0))
	if err == nil && found.Cgroup == 0 {
		return ErrNoCgroups
	}
	return failure.Wrap(err, "asking for the cgroup of a socket")
}
