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

// DialContext makes a TCP connection from the pod's network namespace that is not
// redirected: for the apiserver, its source is the pod's own address. network is "tcp",
// "tcp4" or "tcp6"; addr must be a literal IP:port, because names are not resolved.
// Cancelling ctx ends the attempt, not the connection.
func (p *Pod) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	network, to, err := literal(network, addr)
	if err != nil {
		return nil, fmt.Errorf("dialing for pod %s: %w", p.known.UID, err)
	}
	var conn net.Conn
	err = netns.OnOwnGoroutine(func() error {
		// A socket belongs to the namespace where it is created, so the thread leaves
		// afterwards: for a literal address, package net creates the socket on this
		// goroutine, then calls ControlContext, then connects.
		leave, err := netns.Enter(p.known.NetNS)
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
	return conn, failure.Wrap(err, "dialing for pod %s", p.known.UID)
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
