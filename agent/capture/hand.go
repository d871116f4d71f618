package capture

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// close closes the files. They may have been closed before.
func (h *Handed) close() {
	if h == nil {
		return
	}
	for _, f := range slices.Concat(h.Listeners, h.Egress) {
		_ = f.Close()
	}
}

// listeners are those of the handed files that are what they should be.
func (h *Handed) listeners(netns *os.File) (listeners, egress map[netip.Addr]*net.TCPListener) {
	if h == nil {
		return nil, nil
	}
	return handedListeners(h.Listeners, netns), handedListeners(h.Egress, netns)
}

func handedListeners(files []*os.File, netns *os.File) map[netip.Addr]*net.TCPListener {
	listeners := map[netip.Addr]*net.TCPListener{}
	for _, f := range files {
		l, err := handedListener(f, netns)
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

// handedListener makes a listener of a file that another process sent.
func handedListener(f *os.File, netns *os.File) (*net.TCPListener, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	if cerr := conn.Control(func(fd uintptr) { err = checkListener(int(fd), netns) }); cerr != nil {
		return nil, cerr
	}
	if err != nil {
		return nil, err
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// checkListener requires a TCP socket that listens on 127.0.0.1 or ::1 in netns.
func checkListener(fd int, netns *os.File) error {
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
	switch at := at.(type) {
	case *unix.SockaddrInet4:
		if netip.AddrFrom4(at.Addr) != loopback4 {
			return errors.New("it is not on 127.0.0.1")
		}
	case *unix.SockaddrInet6:
		if netip.AddrFrom16(at.Addr) != loopback6 {
			return errors.New("it is not on ::1")
		}
	default:
		return errors.New("it is not of IP")
	}
	home, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
	if err != nil {
		return os.NewSyscallError("ioctl", err)
	}
	its := os.NewFile(uintptr(home), "netns")
	defer its.Close()
	if !sameFile(its, netns) {
		return errors.New("it is in another network namespace")
	}
	return nil
}

// duplicate copies a listener's descriptor. Unlike that of its own File, the
// copy does not make both block when it is asked for its number.
func duplicate(l *net.TCPListener) (*os.File, error) {
	conn, err := l.SyscallConn()
	if err != nil {
		return nil, err
	}
	copied := -1
	if cerr := conn.Control(func(fd uintptr) { copied, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return nil, cerr
	}
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(copied), "listener"), nil
}
