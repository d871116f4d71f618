package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// listen opens listeners on 127.0.0.1 and ::1 of the calling thread's network
// namespace, on one port: last if it is free, else the kernel's choice. Without
// IPv6 there is only the first. None shares its port (SO_REUSEPORT), or a
// process of the pod could join in and take connections away.
func listen(last uint16) ([]net.Listener, uint16, error) {
	const attempts = 32 // the port the kernel found free for IPv4 may be taken for IPv6
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	loopback4, loopback6 := netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()

	var err error
	for range attempts {
		var v4, v6 net.Listener
		v4, err = config.Listen(context.Background(), "tcp4", netip.AddrPortFrom(loopback4, last).String())
		last = 0
		if errors.Is(err, unix.EADDRINUSE) {
			continue
		} else if err != nil {
			break
		}
		port := v4.Addr().(*net.TCPAddr).AddrPort().Port()
		v6, err = config.Listen(context.Background(), "tcp6", netip.AddrPortFrom(loopback6, port).String())
		switch {
		case err == nil:
			return []net.Listener{v4, v6}, port, nil
		case errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.EAFNOSUPPORT):
			return []net.Listener{v4}, port, nil
		}
		v4.Close()
		if !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return nil, 0, fmt.Errorf("listen in the pod's network namespace: %w", err)
}
