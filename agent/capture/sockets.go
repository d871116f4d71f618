package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

var loopback4, loopback6 = netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()

// listen opens listeners on 127.0.0.1 and ::1 of the calling thread's network namespace,
// on one port: that of the given ones, which are used instead of new ones; else last if it
// is free, else the kernel's choice. Where the kernel has no IPv6 there is only the first.
// No listener shares its port (SO_REUSEPORT): a process of the pod could take connections.
func listen(last uint16, given map[netip.Addr]*net.TCPListener) ([]*net.TCPListener, error) {
	const attempts = 32 // a port that is free for IPv4 may be in use for IPv6
	v4, v6 := given[loopback4], given[loopback6]
	if v4 != nil && v6 != nil && portOf(v4) != portOf(v6) {
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

// listen opens listeners in the pod's network namespace.
func (l *listening) listen(last uint16, given map[netip.Addr]*net.TCPListener) (sockets []*net.TCPListener, err error) {
	err = netns.Do(l.netns, func() (err error) {
		sockets, err = listen(last, given)
		return err
	})
	return sockets, err
}

// listenBoth opens the listeners that are nil, on the port of the other one, else on last.
// It stops at the first failure.
func listenBoth(last uint16, v4, v6 *net.TCPListener) (_, _ *net.TCPListener, err error) {
	switch {
	case v4 != nil:
		last = portOf(v4)
	case v6 != nil:
		last = portOf(v6)
	}
	if v4 == nil {
		v4, err = listenAt(loopback4, last)
	}
	if v4 != nil && v6 == nil {
		v6, err = listenAt(loopback6, portOf(v4))
	}
	return v4, v6, err
}

func portOf(l *net.TCPListener) uint16 { return uint16(l.Addr().(*net.TCPAddr).Port) }

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

// DialContext makes a TCP connection from the pod's network namespace that is not
// redirected: for the apiserver, its source is the pod's own address. network is "tcp",
// "tcp4" or "tcp6"; addr must be a literal IP:port, because names are not resolved.
// Cancelling ctx ends the attempt, not the connection.
func (p *Pod) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	network, to, err := literal(network, addr)
	if err != nil {
		return nil, fmt.Errorf("dialing for pod %s: %w", p.uid, err)
	}
	var conn net.Conn
	err = netns.OnOwnGoroutine(func() error {
		// A socket belongs to the namespace where it is created, so the thread leaves
		// afterwards: for a literal address, package net creates the socket on this
		// goroutine, then calls ControlContext, then connects.
		leave, err := netns.Enter(p.netns)
		if err != nil {
			return err
		}
		left := false
		dialer := net.Dialer{ControlContext: func(_ context.Context, _, _ string, c syscall.RawConn) error {
			if left {
				// On this error, and on a connection to itself, package net tries again. That
				// socket would be in the agent's namespace.
				return unix.EADDRNOTAVAIL
			}
			left = true
			return errors.Join(descriptor.ControlRaw(c, p.node.mark), leave())
		}}
		dialer.SetMultipathTCP(false) // a subflow has a socket of its own, which would not be marked
		conn, err = dialer.DialContext(ctx, network, to.String())
		if !left {
			err = errors.Join(err, leave())
		}
		return err
	})
	return conn, failure.Wrap(err, "dialing for pod %s", p.uid)
}

// literal returns the network and address with which package net has no choice.
func literal(network, addr string) (string, netip.AddrPort, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return "", to, err
	}
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if !isServer(to) {
		return "", to, fmt.Errorf("not the address of a server: %s", addr)
	}
	family := "tcp4"
	if to.Addr().Is6() {
		family = "tcp6"
	}
	if network != "tcp" && network != family {
		return "", to, fmt.Errorf("%s: %w", addr, net.UnknownNetworkError(network))
	}
	return family, to, nil
}
