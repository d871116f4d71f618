// Package process tells when processes have ended.
package process

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// most bounds the processes that are watched together: each takes a file descriptor.
const most = 256

// Watch is of some processes.
type Watch struct {
	files []*os.File // pidfds
	ended chan struct{}
	close sync.Once
}

// New watches the processes that these are now. One that has ended already counts as
// ended; if another has its number by now, that one is waited for.
func New(pids []int) (*Watch, error) {
	if len(pids) > most {
		return nil, fmt.Errorf("%d processes are more than the %d that are watched together", len(pids), most)
	}
	w := &Watch{ended: make(chan struct{})}
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
		if errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			w.Close()
			return nil, fmt.Errorf("watching process %d: %w", pid, err)
		}
		w.files = append(w.files, os.NewFile(uintptr(fd), fmt.Sprintf("pidfd of %d", pid)))
	}
	go w.wait()
	return w, nil
}

// Ended is closed when all of the processes have ended. It stays open after an error
// and after Close.
func (w *Watch) Ended() <-chan struct{} { return w.ended }

// Close ends the watch.
func (w *Watch) Close() {
	w.close.Do(func() {
		for _, f := range w.files {
			_ = f.Close()
		}
	})
}

func (w *Watch) wait() {
	for _, f := range w.files {
		conn, err := f.SyscallConn()
		if err != nil {
			return
		}
		over := false
		err = conn.Read(func(fd uintptr) bool { // again whenever the runtime sees it readable
			polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(polled, 0)
			over = err == nil && n == 1 && polled[0].Revents&unix.POLLIN != 0
			return over || err != nil && !errors.Is(err, unix.EINTR)
		})
		if err != nil || !over {
			return
		}
	}
	close(w.ended)
}
