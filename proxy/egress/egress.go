// Package egress serves the connections of a pod to other hosts than the apiserver:
// it sees who is asked for what, lets rules decide, and passes on the rest.
package egress

import (
	"net"
	"net/netip"
)

// Conn is a connection of the pod that was redirected. If it has a method NetConn as
// tls.Conn has, it adds nothing to the connection which that returns.
type Conn interface {
	net.Conn
	// To is where the pod meant to connect.
	To() netip.AddrPort
}
