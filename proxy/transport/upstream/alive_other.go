//go:build !linux

package upstream

import "net"

// alive is not implemented on this platform: requests on closed connections fail.
func alive(net.Conn) bool { return true }
