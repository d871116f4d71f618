package upstream

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// boundUnanswered breaks a connection whose peer acknowledges nothing of what it
// was sent for the given time. The kernel itself gives up after a quarter of an
// hour, and keep-alives probe only what has nothing to send.
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
