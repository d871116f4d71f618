package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// DialContext makes a TCP connection from the pod's network namespace that is
// not redirected: for the apiserver, its source is the pod's own address.
// network is "tcp", "tcp4" or "tcp6"; addr must be a literal IP:port, since
// names are resolved nowhere. Cancelling ctx ends the attempt, not the connection.
func (p *Pod) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	network, to, err := literal(network, addr)
	if err != nil {
		return nil, fmt.Errorf("dial for pod %s: %w", p.uid, err)
	}
	var conn net.Conn
	err = onOwnGoroutine(func() error {
		// A socket belongs to the namespace it was made in. So the thread is in
		// there for no longer than that: package net makes the socket for a literal
		// address on this goroutine, then calls ControlContext, then connects.
		leave, err := enter(p.netns)
		if err != nil {
			return err
		}
		left := false
		dialer := net.Dialer{ControlContext: func(_ context.Context, _, _ string, c syscall.RawConn) error {
			if left {
				// On this error, and on a connection to itself, net tries again, with a
				// socket that would be the agent's namespace's.
				return unix.EADDRNOTAVAIL
			}
			left = true
			return errors.Join(p.mark(c), leave())
		}}
		dialer.SetMultipathTCP(false) // a subflow would be a socket of its own, unmarked
		conn, err = dialer.DialContext(ctx, network, to.String())
		if !left {
			err = errors.Join(err, leave())
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("dial for pod %s: %w", p.uid, err)
	}
	return conn, nil
}

func (p *Pod) mark(c syscall.RawConn) (err error) {
	if cerr := c.Control(func(fd uintptr) { err = p.node.mark(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// literal returns the one network and address that package net has no choice about.
func literal(network, addr string) (string, netip.AddrPort, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return "", to, err
	}
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if to.Addr().IsUnspecified() || to.Addr().Zone() != "" || to.Port() == 0 {
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
