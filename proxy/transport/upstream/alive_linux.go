package upstream

import (
	"errors"
	"net"
	"syscall"

	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
)

// alive reports whether an idle HTTP/1.1 connection seems open: there is nothing to read,
// not even the end of the stream.
func alive(c net.Conn) bool {
	if b, ok := c.(interface{ Buffered() int }); ok && b.Buffered() > 0 {
		return false
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return true
	}
	err := descriptor.Control(sc, func(fd int) error {
		var b [1]byte
		_, _, err := syscall.Recvfrom(fd, b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		return err
	})
	return errors.Is(err, syscall.EAGAIN) // the same number as EWOULDBLOCK
}
