//go:build !linux

package upstream

import (
	"net"
	"time"
)

// boundUnanswered is not implemented on this platform.
func boundUnanswered(net.Conn, time.Duration) {}
