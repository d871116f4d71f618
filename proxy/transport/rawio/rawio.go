// Package rawio reads and writes TCP connections by system calls that the scheduler of Go does not see. After an
// ordinary system call of a process that was idle, the runtime wakes its monitor, which then polls. For a proxy that
// waits most of the time this costs a fifth of its processor time. These system calls never block: the runtime's poller
// waits, so that deadlines and Close work as usual.
package rawio

import "net"

// Conn is a TCP connection. NetConn returns it as it was.
type Conn struct {
	*net.TCPConn
	in  input
	out output
}

// New returns a connection, to be read and written by itself alone, if it is of TCP, and if the platform is
// supported. Otherwise it returns the connection as it is.
func New(c net.Conn) net.Conn { return conn(c, false) }

// Ahead is New for connections of TLS: a call reads up to 16 KiB ahead, because crypto/tls asks for the head of a
// record alone. What was read ahead is lost to those who read from NetConn.
func Ahead(c net.Conn) net.Conn { return conn(c, true) }

func conn(c net.Conn, ahead bool) net.Conn {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	return wrap(tcp, ahead)
}

// NetConn returns the connection that the kernel can copy from and to.
func (c *Conn) NetConn() net.Conn { return c.TCPConn }
