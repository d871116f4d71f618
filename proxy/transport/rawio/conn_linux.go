//go:build amd64 || arm64

package rawio

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// input is the state of a read, and output that of a write. Their steps are made once, so that a call allocates
// nothing.
type input struct {
	transfer
	got int
}

type output struct{ transfer }

type transfer struct {
	mu    sync.Mutex
	raw   syscall.RawConn
	step  func(fd uintptr) (done bool)
	b     []byte
	errno syscall.Errno
}

func wrap(tcp *net.TCPConn) net.Conn {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return tcp
	}
	c := &Conn{TCPConn: tcp}
	c.in.raw, c.in.step = raw, c.in.receive
	c.out.raw, c.out.step = raw, c.out.send
	return c
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	in := &c.in
	in.mu.Lock()
	defer in.mu.Unlock()
	in.b, in.got, in.errno = b, 0, 0
	err := in.raw.Read(in.step)
	in.b = nil
	switch {
	case err != nil:
		return 0, named(err, "read")
	case in.errno != 0:
		return 0, c.failed("read", "recvfrom", in.errno)
	case in.got == 0:
		return 0, io.EOF
	}
	return in.got, nil
}

// receive reads what there is.
func (t *input) receive(fd uintptr) (done bool) {
	for {
		n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&t.b[0])), uintptr(len(t.b)), syscall.MSG_DONTWAIT, 0, 0)
		switch errno {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return false
		case 0:
			received(fd)
			t.got = int(n)
		}
		t.errno = errno
		return true
	}
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (int, error) {
	out := &c.out
	out.mu.Lock()
	defer out.mu.Unlock()
	out.b, out.errno = b, 0
	err := out.raw.Write(out.step)
	n := len(b) - len(out.b)
	out.b = nil
	switch {
	case err != nil:
		return n, named(err, "write")
	case out.errno != 0:
		return n, c.failed("write", "sendto", out.errno)
	}
	return n, nil
}

// send writes as much as there is room for, until all is written.
func (t *output) send(fd uintptr) (done bool) {
	sending(fd)
	for len(t.b) > 0 {
		n, _, errno := syscall.RawSyscall6(syscall.SYS_SENDTO, fd, uintptr(unsafe.Pointer(&t.b[0])), uintptr(len(t.b)), syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL, 0, 0)
		switch errno {
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		case 0:
			t.b = t.b[n:]
		default:
			t.errno = errno
			return true
		}
	}
	return true
}

// failed returns the error that the net package would return.
func (c *Conn) failed(op, call string, errno syscall.Errno) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(call, errno)}
}

// named names the operation of an error of a RawConn.
func named(err error, op string) error {
	if e, ok := errors.AsType[*net.OpError](err); ok {
		e.Op = op
	}
	return err
}
