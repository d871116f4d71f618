package capture

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ownNetNS is the network namespace of the calling thread. That of the process
// is its first thread's, which may be elsewhere for a moment. Tests change it.
var ownNetNS = "/proc/thread-self/ns/net"

// nodeNetNS is that of the node's first process, where the agent sees it.
const nodeNetNS = "/proc/1/ns/net"

// openNetNS opens the network namespace at path. Unless shared, it must be
// neither the agent's own nor the node's.
func openNetNS(path string, shared bool) (*os.File, error) {
	netns, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	if shared {
		return netns, nil
	}
	for _, path := range []string{ownNetNS, nodeNetNS} {
		other, err := os.Open(path)
		if path == nodeNetNS && err != nil {
			continue
		}
		if err != nil {
			netns.Close()
			return nil, fmt.Errorf("open own network namespace: %w", err)
		}
		same := sameFile(netns, other)
		other.Close()
		if same {
			netns.Close()
			return nil, ErrHostNetwork
		}
	}
	return netns, nil
}

func sameFile(a, b *os.File) bool {
	x, xerr := a.Stat()
	y, yerr := b.Stat()
	return xerr == nil && yerr == nil && os.SameFile(x, y)
}

// inNetNS runs f in the network namespace netns. What f starts in another
// goroutine is not in there.
func inNetNS(netns *os.File, f func() error) error {
	return onOwnGoroutine(func() error {
		leave, err := enter(netns)
		if err != nil {
			return err
		}
		return errors.Join(f(), leave())
	})
}

// onOwnGoroutine waits for f on a goroutine that ends with it. A thread that f
// could not bring home then dies too, rather than take the caller along.
func onOwnGoroutine(f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return <-done
}

// enter moves the calling goroutine, locked to its thread, into netns. leave
// moves it back and unlocks it; if it fails the goroutine must end.
func enter(netns *os.File) (leave func() error, err error) {
	runtime.LockOSThread()
	home, err := os.Open(ownNetNS)
	if err == nil {
		if err = setns(netns); err != nil {
			home.Close()
		}
	}
	if err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("enter the pod's network namespace: %w", err)
	}
	return func() error {
		defer home.Close()
		if err := setns(home); err != nil {
			return fmt.Errorf("leave the pod's network namespace: %w", err)
		}
		runtime.UnlockOSThread()
		return nil
	}, nil
}

// setns moves the calling thread. It holds on to the descriptor, so that
// closing the file meanwhile cannot make it another one's.
func setns(netns *os.File) error {
	conn, err := netns.SyscallConn()
	if err != nil {
		return err
	}
	if conn.Control(func(fd uintptr) { err = unix.Setns(int(fd), unix.CLONE_NEWNET) }) != nil {
		return os.ErrClosed
	}
	return os.NewSyscallError("setns", err)
}

// netnsCookie returns the cookie of the calling thread's network namespace: a
// number that no other namespace gets until the node boots again.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("netns cookie: %w", os.NewSyscallError("socket", err))
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("netns cookie: %w", os.NewSyscallError("getsockopt", err))
	}
	return cookie, nil
}

// newNetNS makes a network namespace in which every address is its own: what is
// connected to there comes by the hook and the rules, if any, and goes nowhere.
func newNetNS() (netns *os.File, err error) {
	err = onOwnGoroutine(func() error {
		runtime.LockOSThread()
		home, err := os.Open(ownNetNS)
		if err != nil {
			return err
		}
		defer home.Close()
		if err := os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNET)); err != nil {
			return err // the thread goes with the goroutine
		}
		if netns, err = os.Open(ownNetNS); err == nil {
			err = makeLocal()
		}
		if err := errors.Join(err, setns(home)); err != nil {
			return err
		}
		runtime.UnlockOSThread()
		return nil
	})
	if err != nil {
		if netns != nil {
			netns.Close()
		}
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	return netns, nil
}

// makeLocal makes every address the calling thread's network namespace's own.
func makeLocal() error {
	links, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer links.Close()
	lo, err := links.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := links.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	for _, everywhere := range []net.IPNet{{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, {IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}} {
		route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: &everywhere, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}
		if err := links.RouteAdd(route); err != nil && everywhere.IP.To4() != nil {
			return fmt.Errorf("route all addresses to lo: %w", err) // for IPv6, there may be none
		}
	}
	return nil
}
