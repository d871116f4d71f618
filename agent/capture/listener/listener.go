// Package listener opens the listeners of an agent in a pod's network namespace, and passes
// them on to the next agent.
package listener

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
)

// Loopback4 is where all listeners of IPv4 are.
var Loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// Loopback6 is where all listeners of IPv6 are.
var Loopback6 = netip.IPv6Loopback()

// Open opens listeners on 127.0.0.1 and ::1 of a network namespace, on one port: that of
// the given ones, which are used instead of new ones; else last if it is free, else the
// kernel's choice. Where the kernel has no IPv6 there is only the first. No listener shares
// its port (SO_REUSEPORT): a process of the pod could take connections.
func Open(namespace *os.File, last uint16, given map[netip.Addr]*net.TCPListener) (sockets []*net.TCPListener, err error) {
	err = netns.Do(namespace, func() (err error) {
		sockets, err = listen(last, given)
		return err
	})
	return sockets, err
}

// listen is Open for the calling thread's network namespace.
func listen(last uint16, given map[netip.Addr]*net.TCPListener) ([]*net.TCPListener, error) {
	const attempts = 32 // a port that is free for IPv4 may be in use for IPv6
	v4, v6 := given[Loopback4], given[Loopback6]
	if v4 != nil && v6 != nil && Port(v4) != Port(v6) {
		v6.Close()
		v6 = nil
	}
	var err error
	for range attempts {
		if v4, v6, err = listenBoth(last, v4, v6); v4 != nil && v6 != nil {
			return []*net.TCPListener{v4, v6}, nil
		}
		if v4 != nil && errors.Is(err, unix.EAFNOSUPPORT) {
			return []*net.TCPListener{v4}, nil
		}
		for _, l := range []*net.TCPListener{v4, v6} {
			if l != nil {
				l.Close()
			}
		}
		v4, v6, last = nil, nil, 0
		if !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return nil, fmt.Errorf("listening in the pod's network namespace: %w", err)
}

// listenBoth opens the listeners that are nil, on the port of the other one, else on last.
// It stops at the first failure.
func listenBoth(last uint16, v4, v6 *net.TCPListener) (_, _ *net.TCPListener, err error) {
	switch {
	case v4 != nil:
		last = Port(v4)
	case v6 != nil:
		last = Port(v6)
	}
	if v4 == nil {
		v4, err = listenAt(Loopback4, last)
	}
	if v4 != nil && v6 == nil {
		v6, err = listenAt(Loopback6, Port(v4))
	}
	return v4, v6, err
}

// Port returns the port of a listener.
func Port(l *net.TCPListener) uint16 { return uint16(l.Addr().(*net.TCPAddr).Port) }

func listenAt(address netip.Addr, port uint16) (*net.TCPListener, error) {
	level, option := unix.SOL_IP, unix.IP_FREEBIND
	if address.Is6() {
		level, option = unix.SOL_IPV6, unix.IPV6_FREEBIND
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// The pod may get the address later, above all that of IPv6.
		return descriptor.ControlRaw(c, func(fd int) error { return unix.SetsockoptInt(fd, level, option, 1) })
	}}
	config.SetMultipathTCP(false)
	l, err := config.Listen(context.Background(), "tcp", netip.AddrPortFrom(address, port).String())
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// Received returns listeners for the valid ones of the files that another process sent.
func Received(files []*os.File, namespace *os.File) map[netip.Addr]*net.TCPListener {
	listeners := map[netip.Addr]*net.TCPListener{}
	for _, f := range files {
		if descriptor.Control(f, func(fd int) error { return check(fd, namespace) }) != nil {
			continue // the pod gets a listener of this agent's own
		}
		opened, err := net.FileListener(f)
		if err != nil {
			continue
		}
		l := opened.(*net.TCPListener) // as check requires
		at := l.Addr().(*net.TCPAddr).AddrPort().Addr()
		if listeners[at] != nil {
			l.Close()
		} else {
			listeners[at] = l
		}
	}
	return listeners
}

// check requires a TCP socket that listens on 127.0.0.1 or ::1 in the namespace.
func check(fd int, namespace *os.File) error {
	for option, want := range map[int]int{unix.SO_TYPE: unix.SOCK_STREAM, unix.SO_PROTOCOL: unix.IPPROTO_TCP, unix.SO_ACCEPTCONN: 1, unix.SO_REUSEPORT: 0} {
		got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, option)
		if err != nil {
			return os.NewSyscallError("getsockopt", err)
		}
		if got != want {
			return fmt.Errorf("socket option %d is %d, not %d", option, got, want)
		}
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return os.NewSyscallError("getsockname", err)
	}
	if address := Address(at).Addr(); address != Loopback4 && address != Loopback6 {
		return fmt.Errorf("it listens on %s, not on 127.0.0.1 or ::1", address)
	}
	number, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
	if err != nil {
		return os.NewSyscallError("ioctl", err)
	}
	its := os.NewFile(uintptr(number), "netns")
	defer its.Close()
	if !netns.Same(its, namespace) {
		return errors.New("it is in another network namespace")
	}
	return nil
}

// Duplicates copies the descriptors of listeners. [net.TCPListener.File] would make both
// block when the copy is asked for its number.
func Duplicates(listeners []*net.TCPListener) (files []*os.File, err error) {
	for _, l := range listeners {
		if err := descriptor.Control(l, func(fd int) error {
			copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
			if err == nil {
				files = append(files, os.NewFile(uintptr(copied), "listener"))
			}
			return os.NewSyscallError("fcntl", err)
		}); err != nil {
			return files, err
		}
	}
	return files, nil
}

// Address returns the address and port of an IP socket; invalid for others.
func Address(at unix.Sockaddr) netip.AddrPort {
	switch at := at.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(at.Addr), uint16(at.Port))
	}
	return netip.AddrPort{}
}
