package capture

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
)

// Close closes the files, unless f is nil. They may have been closed before.
func (f *Files) Close() {
	if f == nil {
		return
	}
	for _, file := range slices.Concat(f.Listeners, f.Egress) {
		_ = file.Close()
	}
}

// listeners returns listeners for the files that are valid, by address.
func (f *Files) listeners(namespace *os.File) (listeners, egress map[netip.Addr]*net.TCPListener) {
	if f == nil {
		return nil, nil
	}
	return listenersOf(f.Listeners, namespace), listenersOf(f.Egress, namespace)
}

// listenersOf returns listeners for the valid ones of the files that another process sent.
func listenersOf(files []*os.File, namespace *os.File) map[netip.Addr]*net.TCPListener {
	listeners := map[netip.Addr]*net.TCPListener{}
	for _, f := range files {
		if descriptor.Control(f, func(fd int) error { return checkListener(fd, namespace) }) != nil {
			continue // the pod gets a listener of this agent's own
		}
		opened, err := net.FileListener(f)
		if err != nil {
			continue
		}
		l := opened.(*net.TCPListener) //nolint:forcetypeassert // as checkListener requires
		at := l.Addr().(*net.TCPAddr).AddrPort().Addr()
		if listeners[at] != nil {
			l.Close()
		} else {
			listeners[at] = l
		}
	}
	return listeners
}

// checkListener requires a TCP socket that listens on 127.0.0.1 or ::1 in the namespace.
func checkListener(fd int, namespace *os.File) error {
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
	if address := addrPort(at).Addr(); address != loopback4 && address != loopback6 {
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

// duplicates copies the descriptors of listeners. [net.TCPListener.File] would make both
// block when the copy is asked for its number.
func duplicates(listeners []*net.TCPListener) (files []*os.File, err error) {
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
