package bpf

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// heartbeat is the page that a map of one number shares with this process.
type heartbeat struct {
	mu   sync.RWMutex // against unmapping
	page []byte
}

func newHeartbeat(m *ebpf.Map) (*heartbeat, error) {
	page, err := unix.Mmap(m.FD(), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the heartbeat: %w", unsupported(os.NewSyscallError("mmap", err)))
	}
	return &heartbeat{page: page}, nil
}

// beat stores the time: one store, that the programs see at once.
func (h *heartbeat) beat() {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // the clock of bpf_ktime_get_ns; it cannot fail
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.page != nil {
		atomic.StoreInt64((*int64)(unsafe.Pointer(unsafe.SliceData(h.page))), now.Nano())
	}
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
