// Package descriptor uses the descriptors of connections, listeners and files. Unlike
// their method Fd, it does not make them blocking.
package descriptor

import "syscall"

// Control calls f with the descriptor of c, which stays open meanwhile.
func Control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return ControlRaw(raw, f)
}

// ControlRaw is Control for a raw connection.
func ControlRaw(raw syscall.RawConn, f func(fd int) error) (err error) {
	if cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}
