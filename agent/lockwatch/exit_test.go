package lockwatch

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// child runs until it is killed.
func child(t *testing.T) *exec.Cmd {
	t.Helper()
	c := exec.Command("sleep", "1000")
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	return c
}

func ended(w *exitWatch, within time.Duration) bool {
	select {
	case <-w.exited:
		return true
	case <-time.After(within):
		return false
	}
}

const (
	soon   = 30 * time.Second
	moment = 50 * time.Millisecond
)

func TestAllProcessesMustExit(t *testing.T) {
	a, b := child(t), child(t)
	w, err := watchExits([]int{a.Process.Pid, b.Process.Pid})
	require.NoError(t, err)
	defer w.Close()
	require.NoError(t, b.Process.Signal(syscall.SIGKILL))
	require.False(t, ended(w, moment), "the other runs")
	require.NoError(t, a.Process.Signal(syscall.SIGSTOP))
	require.False(t, ended(w, moment), "who is stopped may go on")
	require.NoError(t, a.Process.Signal(syscall.SIGKILL))
	require.True(t, ended(w, soon), "though nobody has waited for them")
}

func TestProcessThatExitedEarlierCountsAsExited(t *testing.T) {
	a := child(t)
	require.NoError(t, a.Process.Kill())
	_ = a.Wait()
	w, err := watchExits([]int{a.Process.Pid})
	require.NoError(t, err)
	defer w.Close()
	require.True(t, ended(w, soon))
}

func TestCloseReportsNoExit(t *testing.T) {
	a := child(t)
	w, err := watchExits([]int{a.Process.Pid})
	require.NoError(t, err)
	w.Close()
	w.Close()
	require.NoError(t, a.Process.Kill())
	require.False(t, ended(w, moment))
}

func TestTooManyProcessesAreRejected(t *testing.T) {
	_, err := watchExits(make([]int, maxProcesses+1))
	require.ErrorContains(t, err, "more than")
	w, err := watchExits([]int{os.Getpid()})
	require.NoError(t, err)
	w.Close()
}
