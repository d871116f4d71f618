package lockwatch

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// maxProcesses bounds the processes of one exitWatch: each takes a file descriptor.
const maxProcesses = 256

// exitWatch waits for the exit of a set of processes.
type exitWatch struct {
	files  []*os.File    // pidfds
	exited chan struct{} // closed when all of the processes have exited, not by an error or Close
}

// watchExits watches the processes that have these pids now. A process that has exited
// already counts as exited. If its pid was reused, the watch waits for the new process.
func watchExits(pids []int) (*exitWatch, error) {
	if len(pids) > maxProcesses {
		return nil, fmt.Errorf("%d processes are more than the %d that are watched together", len(pids), maxProcesses)
	}
	w := &exitWatch{exited: make(chan struct{})}
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

// Close ends the watch.
func (w *exitWatch) Close() {
	for _, f := range w.files {
		_ = f.Close()
	}
}

func (w *exitWatch) wait() {
	for _, f := range w.files {
		conn, err := f.SyscallConn()
		if err != nil {
			return
		}
		exited := false
		err = conn.Read(func(fd uintptr) bool { // again whenever the runtime sees it readable
			polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(polled, 0)
			exited = err == nil && n == 1 && polled[0].Revents&unix.POLLIN != 0
			return exited || err != nil && !errors.Is(err, unix.EINTR)
		})
		if err != nil || !exited {
			return
		}
	}
	close(w.exited)
}
