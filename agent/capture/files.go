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

func listenersOf(files []*os.File, namespace *os.File) map[netip.Addr]*net.TCPListener {
	listeners := map[netip.Addr]*net.TCPListener{}
	for _, f := range files {
		l, err := listenerOf(f, namespace)
		if err != nil {
			continue // the pod gets a listener of this agent's own
		}
		at := l.Addr().(*net.TCPAddr).AddrPort().Addr()
		if listeners[at] != nil {
			l.Close()
			continue
		}
		listeners[at] = l
	}
	return listeners
}

// listenerOf returns a listener for a file that another process sent.
func listenerOf(f *os.File, namespace *os.File) (*net.TCPListener, error) {
	if err := control(f, func(fd int) error { return checkListener(fd, namespace) }); err != nil {
		return nil, err
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
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
	var address netip.Addr
	switch at := at.(type) {
	case *unix.SockaddrInet4:
		address = netip.AddrFrom4(at.Addr)
	case *unix.SockaddrInet6:
		address = netip.AddrFrom16(at.Addr)
	}
	if address != loopback4 && address != loopback6 {
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

func duplicates(listeners []*net.TCPListener) (files []*os.File, err error) {
	for _, l := range listeners {
		f, err := duplicate(l)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, nil
}

// duplicate copies a listener's descriptor. [net.TCPListener.File] would make both block
// when the copy is asked for its number.
func duplicate(l *net.TCPListener) (*os.File, error) {
	copied := -1
	if err := control(l, func(fd int) (err error) {
		copied, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		return os.NewSyscallError("fcntl", err)
	}); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(copied), "listener"), nil
}
