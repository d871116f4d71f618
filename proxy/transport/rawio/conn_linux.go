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
	// ahead means that more is read than is asked for. rest is what is left of it, in pooled.
	ahead  bool
	rest   []byte
	pooled *[]byte
}

// aheadBuffers have room for a record of TLS. Connections that wait have none.
var aheadBuffers = sync.Pool{New: func() any { b := make([]byte, 16<<10+64); return &b }}

type output struct{ transfer }

type transfer struct {
	mu    sync.Mutex
	raw   syscall.RawConn
	step  func(fd uintptr) (done bool)
	b     []byte
	errno syscall.Errno
}

func wrap(tcp *net.TCPConn, ahead bool) net.Conn {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return tcp
	}
	c := &Conn{TCPConn: tcp}
	c.in.raw, c.in.step, c.in.ahead = raw, c.in.receive, ahead
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
	if len(in.rest) > 0 {
		return in.take(b), nil
	}
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
	if t.ahead {
		return t.receiveAhead(fd)
	}
	t.got, t.errno = receive(fd, t.b)
	return t.errno != syscall.EAGAIN
}

// receiveAhead reads what there is, and keeps what b has no room for.
func (t *input) receiveAhead(fd uintptr) (done bool) {
	pooled := aheadBuffers.Get().(*[]byte)
	if len(t.b) >= len(*pooled) {
		aheadBuffers.Put(pooled)
		t.got, t.errno = receive(fd, t.b)
		return t.errno != syscall.EAGAIN
	}
	n, errno := receive(fd, *pooled)
	t.errno, t.pooled, t.rest = errno, pooled, (*pooled)[:n]
	t.got = t.take(t.b)
	return errno != syscall.EAGAIN
}

// take copies what was read ahead to b, and frees its buffer when nothing is left.
func (t *input) take(b []byte) int {
	n := copy(b, t.rest)
	if t.rest = t.rest[n:]; len(t.rest) == 0 {
		aheadBuffers.Put(t.pooled)
		t.rest, t.pooled = nil, nil
	}
	return n
}

func receive(fd uintptr, b []byte) (int, syscall.Errno) {
	for {
		n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), syscall.MSG_DONTWAIT, 0, 0)
		switch errno {
		case syscall.EINTR:
			continue
		case 0:
			received(fd)
			return int(n), 0
		}
		return 0, errno
	}
}

// Buffered returns how many bytes were read ahead.
func (c *Conn) Buffered() int {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	return len(c.in.rest)
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
