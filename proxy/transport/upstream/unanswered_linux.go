package upstream

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
)

// boundUnanswered makes the kernel close a connection whose peer acknowledges no data for
// the given time. By default that takes a quarter of an hour, and keep-alives are sent only
// if there is no data to send.
func boundUnanswered(c net.Conn, within time.Duration) {
	if sc, ok := c.(syscall.Conn); ok {
		_ = descriptor.Control(sc, func(fd int) error {
			return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(within.Milliseconds()))
		})
	}
}
