package bpf

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// heartbeat is the memory page of the map of the last heartbeat, shared with the kernel.
type heartbeat struct {
	mu     sync.Mutex // against unmapping
	page   []byte
	lapsed bool // at some time since the last beat of this process, none was recent
}

// patience is PATIENCE of redirect.c.
const patience = 2 * time.Second

func newHeartbeat(m *ebpf.Map) (*heartbeat, error) {
	page, err := unix.Mmap(m.FD(), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping the heartbeat: %w", unsupported(os.NewSyscallError("mmap", err)))
	}
	h := &heartbeat{page: page}
	h.lapsed = monotonic()-atomic.LoadInt64(h.last()) > int64(patience)
	return h, nil
}

func (h *heartbeat) last() *int64 { return (*int64)(unsafe.Pointer(unsafe.SliceData(h.page))) }

// monotonic is the clock of bpf_ktime_get_ns.
func monotonic() int64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // it cannot fail
	return now.Nano()
}

// beat stores the time, which the programs see at once.
func (h *heartbeat) beat() (lapsed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.page == nil {
		return false
	}
	now := monotonic()
	before := atomic.SwapInt64(h.last(), now)
	lapsed = h.lapsed || now-before > int64(patience)
	h.lapsed = false
	return lapsed
}

func (h *heartbeat) close() error {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.page == nil {
		return nil
	}
	page := h.page
	h.page = nil
	return os.NewSyscallError("munmap", unix.Munmap(page))
}
