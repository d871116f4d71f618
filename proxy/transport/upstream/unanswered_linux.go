package upstream

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// boundUnanswered makes the kernel close a connection whose peer acknowledges no data for
// the given time. By default that takes a quarter of an hour, and keep-alives are sent only
// if there is no data to send.
func boundUnanswered(c net.Conn, within time.Duration) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return
	}
	if raw, err := sc.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(within.Milliseconds()))
		})
	}
}
