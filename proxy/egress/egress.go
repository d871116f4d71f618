// Package egress serves the connections of a pod to other hosts than the apiserver:
// it sees who is asked for what, lets rules decide, and passes on the rest.
package egress

import (
	"net"
	"net/netip"
)

// Conn is a connection of the pod that was redirected.
type Conn struct {
	net.Conn
	// To is where the pod meant to connect.
	To netip.AddrPort
}
