package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// A file is a header and slots of the same size, one for each pod.
const (
	version  = 1
	size     = 128
	slots    = 2048
	fileSize = size * (1 + slots)
	maxUID   = 64

	// Offsets in the header.
	atVersion  = 8 // behind magic
	atBoot     = 16
	atSocket   = 96 // two numbers
	atOverflow = 120

	// Offsets in a slot. The counters do not share a cache line with another slot's.
	atOpen   = 64
	atUntil  = 72
	atUnseen = 80
	atClosed = 88

	magic = "ctrlmesh"
)

var (
	errOtherBoot = errors.New("the journal is from before the node booted")
	errFormat    = errors.New("the journal has another format")
)

// mapped is a journal in memory.
type mapped []byte

func mapFile(f *os.File) (mapped, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() != fileSize { // access beyond the end would kill the process
		return nil, errFormat
	}
	m, err := unix.Mmap(int(f.Fd()), 0, fileSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return m, os.NewSyscallError("mmap", err)
}

func (m mapped) unmap() { _ = unix.Munmap(m) }

func header(boot string) []byte {
	h := make([]byte, size)
	copy(h, magic)
	binary.LittleEndian.PutUint64(h[atVersion:], version)
	copy(h[atBoot:atSocket], boot)
	return h
}

// check returns why the journal cannot be used in this boot, if so.
func (m mapped) check(boot string) error {
	want := header(boot)
	switch {
	case !bytes.Equal(m[:atBoot], want[:atBoot]):
		return errFormat
	case !bytes.Equal(m[atBoot:atSocket], want[atBoot:atSocket]):
		return errOtherBoot
	}
	return nil
}

// setSocket records the takeover socket of the agent.
func (m mapped) setSocket(id [2]int64) {
	for i, v := range id {
		number(m, atSocket+8*i).Store(v)
	}
}

// servedAs reports whether the agent served by this socket.
func (m mapped) servedAs(last [2]int64) bool {
	return last != [2]int64{} && last == [2]int64{number(m, atSocket).Load(), number(m, atSocket+8).Load()}
}

// overflow is not 0 if a pod has no slot.
func (m mapped) overflow() *atomic.Int64 { return number(m, atOverflow) }

func (m mapped) slot(i int) slot { return slot(m[size*(i+1) : size*(i+2) : size*(i+2)]) }

// slot is the state of one pod's writes.
type slot []byte

// uid of the pod; "" if the slot is free.
func (s slot) uid() string {
	uid, _, _ := bytes.Cut(s[:maxUID], []byte{0})
	return string(uid)
}

// open counts writes that were forwarded, or are about to be, and have not ended.
func (s slot) open() *atomic.Int64 { return number(s, atOpen) }

// until is when the last lost write cannot take effect any more, in nanoseconds.
func (s slot) until() *atomic.Int64 { return number(s, atUntil) }

// unseen is how long a write may take effect if its end was not seen, in nanoseconds.
func (s slot) unseen() *atomic.Int64 { return number(s, atUnseen) }

// closed is when the last write could begin, in nanoseconds; 0: writes begin.
func (s slot) closed() *atomic.Int64 { return number(s, atClosed) }

// over reports whether no write can take effect any more.
func (s slot) over(now int64) bool {
	return s.closed().Load() != 0 && s.open().Load() <= 0 && s.until().Load() <= now
}

// extend sets a number to at least v.
func extend(n *atomic.Int64, v int64) {
	for {
		old := n.Load()
		if old >= v || n.CompareAndSwap(old, v) {
			return
		}
	}
}

func number(b []byte, at int) *atomic.Int64 {
	return (*atomic.Int64)(unsafe.Pointer(&b[at])) // aligned: a mapping begins at a page
}

// bootTime is the time since the node started, suspension included.
func bootTime() int64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // every supported kernel has this clock
	return now.Nano()
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), failure.Wrap(err, "reading the boot ID")
}

// tryLock reports whether the lock of a file was free, and takes it.
func tryLock(f *os.File) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, os.NewSyscallError("flock", err)
}

// pollInterval is how often journals of others are read.
const pollInterval = 50 * time.Millisecond

func unlock(f *os.File) { _ = unix.Flock(int(f.Fd()), unix.LOCK_UN) }
