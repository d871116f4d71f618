// Package netns enters network namespaces and asks about them.
package netns

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Own is the network namespace of the calling thread. That of the process is its first
// thread's, which may be in another one for a moment. Tests change it.
var Own = "/proc/thread-self/ns/net"

// node is the network namespace of the node's first process, where the agent sees it.
const node = "/proc/1/ns/net"

// ErrHostNetwork means that a pod has no network namespace of its own.
var ErrHostNetwork = errors.New("the pod has no network namespace of its own")

// Open opens the network namespace at path. Unless shared, it must be neither the agent's
// own nor the node's.
func Open(path string, shared bool) (*os.File, error) {
	namespace, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening network namespace: %w", err)
	}
	if shared {
		return namespace, nil
	}
	its, err := namespace.Stat()
	own, ownErr := os.Stat(Own)
	host, _ := os.Stat(node)
	switch err = cmp.Or(err, ownErr); {
	case err != nil:
		err = fmt.Errorf("opening own network namespace: %w", err)
	case os.SameFile(its, own), host != nil && os.SameFile(its, host):
		err = ErrHostNetwork
	default:
		return namespace, nil
	}
	namespace.Close()
	return nil, err
}

// Same reports whether two files are of one network namespace.
func Same(a, b *os.File) bool {
	x, xerr := a.Stat()
	y, yerr := b.Stat()
	return xerr == nil && yerr == nil && os.SameFile(x, y)
}

// Do runs f in a network namespace. What f starts in another goroutine does not run there.
func Do(namespace *os.File, f func() error) error {
	return OnOwnGoroutine(func() error {
		leave, err := Enter(namespace)
		if err != nil {
			return err
		}
		return errors.Join(f(), leave())
	})
}

// OnOwnGoroutine waits for f on a goroutine that ends with it. If the thread could not
// return to its namespace, it ends with the goroutine and serves no other.
func OnOwnGoroutine(f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return <-done
}

// Enter locks the calling goroutine to its thread and moves it into a network namespace.
// leave moves it back and unlocks it; if leave fails, the goroutine must end.
func Enter(namespace *os.File) (leave func() error, err error) {
	runtime.LockOSThread()
	home, err := unix.Open(Own, unix.O_RDONLY|unix.O_CLOEXEC, 0) // os.Open would offer it to the poller
	if err == nil {
		if err = Set(namespace); err != nil {
			_ = unix.Close(home)
		}
	}
	if err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("entering the pod's network namespace: %w", err)
	}
	return func() error {
		defer unix.Close(home)
		if err := unix.Setns(home, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("leaving the pod's network namespace: %w", os.NewSyscallError("setns", err))
		}
		runtime.UnlockOSThread()
		return nil
	}, nil
}

// Set moves the calling thread. It keeps the descriptor open meanwhile, so that its number
// cannot become another file's.
func Set(namespace *os.File) error {
	conn, err := namespace.SyscallConn()
	if err != nil {
		return err
	}
	if conn.Control(func(fd uintptr) { err = unix.Setns(int(fd), unix.CLONE_NEWNET) }) != nil {
		return os.ErrClosed
	}
	return os.NewSyscallError("setns", err)
}

// Cookie returns the cookie of the calling thread's network namespace: a number that no
// other namespace gets until the node boots again.
func Cookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("reading the netns cookie: %w", os.NewSyscallError("socket", err))
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	return cookie, failure.Wrap(os.NewSyscallError("getsockopt", err), "reading the netns cookie")
}

// New creates a network namespace that has nothing but lo, where every address is local:
// connections pass the hook and the rules, if there are any, and leave for nowhere.
func New() (namespace *os.File, err error) {
	err = OnOwnGoroutine(func() error {
		runtime.LockOSThread()
		home, err := os.Open(Own)
		if err != nil {
			return err
		}
		defer home.Close()
		if err := os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNET)); err != nil {
			return err // the thread ends with the goroutine
		}
		if namespace, err = os.Open(Own); err == nil {
			err = makeLocal()
		}
		if err := errors.Join(err, Set(home)); err != nil {
			return err
		}
		runtime.UnlockOSThread()
		return nil
	})
	if err != nil {
		if namespace != nil {
			namespace.Close()
		}
		return nil, fmt.Errorf("creating a network namespace: %w", err)
	}
	return namespace, nil
}

// makeLocal makes every address local to the calling thread's network namespace.
func makeLocal() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("setting lo up: %w", err)
	}
	for _, all := range []net.IPNet{{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, {IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}} {
		route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: &all, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}
		if err := netlink.RouteAdd(route); err != nil && all.IP.To4() != nil {
			return fmt.Errorf("routing all addresses to lo: %w", err) // there may be no IPv6
		}
	}
	return nil
}

// maxAddresses bounds Addresses. The table of those of a node's pods has 65,536 entries, and a pod
// with CAP_NET_ADMIN may give itself any number.
const maxAddresses = 256

// Addresses returns the addresses at which a process in a network namespace may listen, up to
// maxAddresses. Those of IPVS, which has the addresses of all Services on a node, are not among
// them.
func Addresses(namespace *os.File) (all []netip.Addr, err error) {
	err = Do(namespace, func() error {
		services := -1
		if ipvs, err := netlink.LinkByName("kube-ipvs0"); err == nil {
			services = ipvs.Attrs().Index
		}
		request := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
		request.AddData(nl.NewIfAddrmsg(netlink.FAMILY_ALL))
		err := request.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWADDR, func(message []byte) bool {
			if at, link := address(message); at.IsValid() && link != services {
				all = append(all, at)
			}
			return len(all) < maxAddresses
		})
		return failure.Wrap(err, "listing the pod's addresses")
	})
	return all, err
}

// address returns the address of a message about one, and the index of its link.
func address(message []byte) (at netip.Addr, link int) {
	head := nl.DeserializeIfAddrmsg(message)
	attributes, err := nl.ParseRouteAttr(message[head.Len():])
	if err != nil {
		return netip.Addr{}, 0
	}
	for _, a := range attributes {
		// IFA_ADDRESS is the peer's if there is an IFA_LOCAL.
		if kind := a.Attr.Type; kind == unix.IFA_LOCAL || kind == unix.IFA_ADDRESS && !at.IsValid() {
			at, _ = netip.AddrFromSlice(a.Value)
		}
	}
	return at.Unmap(), int(head.Index)
}
