//go:build !linux

package upstream

import (
	"net"
	"time"
)

// boundUnanswered leaves it to the kernel here.
func boundUnanswered(net.Conn, time.Duration) {}
