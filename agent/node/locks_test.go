package node

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/lockwatch"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// writer is a pod whose lock is written by the test.
type writer struct {
	holders atomic.Pointer[[]lock.Holder]
	written chan struct{}
	quiet   chan error
	done    chan struct{}
}

func (w *writer) Holders() []lock.Holder         { return *w.holders.Load() }
func (w *writer) HolderWritten() <-chan struct{} { return w.written }
func (w *writer) Done() <-chan struct{}          { return w.done }
func (w *writer) Quiet(ctx context.Context) error {
	select {
	case err := <-w.quiet:
		return err
	case <-w.done: // the test is over
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// write returns when the one before was looked at.
func (w *writer) write(t *testing.T, identity, version string) {
	t.Helper()
	w.writeAll(t, lease("lock", identity, version))
}

func lease(name, identity, version string) lock.Holder {
	return lock.Holder{Namespace: "ns", Name: name, Identity: identity, Version: version, Resource: "leases"}
}

func (w *writer) writeAll(t *testing.T, holders ...lock.Holder) {
	t.Helper()
	w.holders.Store(&holders)
	select {
	case w.written <- struct{}{}:
	case <-time.After(soon):
		t.Fatal("nobody looks at what is written")
	}
}

// watched is a mesh that looks after a pod with a sandbox, whose lock is written.
func watched(t *testing.T) (*running, *writer) {
	t.Helper()
	r := start(t, 0)
	r.in(t, func() {
		sandboxes{r.Node}.announce(sandbox("5a5a"))
	})
	r.runs(t, "cri-5a5a")
	w := &writer{written: make(chan struct{}), quiet: make(chan error), done: make(chan struct{})}
	over := make(chan struct{})
	go func() { defer close(over); r.watchLocks(uidA, w) }()
	t.Cleanup(func() { close(w.done); <-over })
	return r, w
}

// runs starts a process in a container. It returns what kills it.
func (r *running) runs(t *testing.T, container string) (kill func()) {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	require.NoError(t, cmd.Start())
	kill = func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	t.Cleanup(kill)
	cgroup := filepath.Join(r.cgroups, "kubepods/pod"+uidA, container)
	require.NoError(t, os.MkdirAll(cgroup, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), fmt.Appendln(nil, cmd.Process.Pid), 0o600))
	return kill
}

// looked waits until a write was taken note of.
func (r *running) looked(t *testing.T, w *writer) {
	t.Helper()
	w.writeAll(t, w.Holders()...) // is taken when the one before is done with
}

func (r *running) dead(t *testing.T) (dead []*meshv1.DeadHolder) {
	t.Helper()
	r.in(t, func() { dead = r.pods[uidA].reporting.exited })
	return dead
}

func TestHolderExitIsReportedAfterItsWrites(t *testing.T) {
	r, w := watched(t)
	operator, sidecar := r.runs(t, "cri-operator"), r.runs(t, "cri-sidecar")
	w.write(t, "pod_1", "7")
	r.looked(t, w)
	operator()
	select {
	case w.quiet <- nil:
		t.Fatal("the operator may have spoken through the sidecar, or be it")
	case <-time.After(50 * time.Millisecond):
	}
	sidecar()
	require.Empty(t, r.dead(t), "a write of his is under way")
	w.quiet <- nil
	r.soon(t, "the report", func() bool { return len(r.pods[uidA].reporting.exited) == 1 })
	require.True(t, proto.Equal(lockwatch.DeadHolder(lease("lock", "pod_1", "7")), r.dead(t)[0]))
	require.Eventually(t, func() bool { return len(r.reported(uidA).GetDeadHolders()) == 1 }, soon, time.Millisecond)

	r.runs(t, "cri-operator-2")
	w.write(t, "pod_1", "8")
	r.looked(t, w)
	require.Empty(t, r.dead(t), "the next one may have his name")
}

// TestEachLockHasItsOwnHolder checks that a lock which a new process has not written yet
// keeps the holder that has ended.
func TestEachLockHasItsOwnHolder(t *testing.T) {
	r, w := watched(t)
	operator := r.runs(t, "cri-operator")
	w.writeAll(t, lease("a", "pod_1", "7"), lease("b", "pod_1", "8"), lease("c", "", "9"))
	r.looked(t, w)
	operator()
	w.quiet <- nil
	r.soon(t, "both locks", func() bool { return len(r.pods[uidA].reporting.exited) == 2 })

	r.runs(t, "cri-operator-2")
	w.writeAll(t, lease("a", "pod_2", "10"), lease("b", "pod_1", "8"), lease("c", "", "9"))
	r.looked(t, w)
	dead := r.dead(t)
	require.Len(t, dead, 1)
	require.Equal(t, "b", dead[0].GetName())
}

// Without the runtime's interface, the sandbox is found by its process.
func TestHolderExitIsReportedWithoutTheRuntime(t *testing.T) {
	r, w := watched(t)
	kill := r.runs(t, "cri-operator")
	for i, container := range []string{"cri-5a5a", "cri-operator"} {
		pid, err := os.ReadFile(filepath.Join(r.cgroups, "kubepods/pod"+uidA, container, "cgroup.procs"))
		require.NoError(t, err)
		dir := filepath.Join(r.proc, strings.TrimSpace(string(pid)))
		require.NoError(t, os.Mkdir(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "stat"), fmt.Appendf(nil, "1 (a) S%s %d", strings.Repeat(" 0", 18), 10+i), 0o600))
		require.NoError(t, os.Symlink([]string{"/pause", "/manager"}[i], filepath.Join(dir, "exe")))
	}
	r.in(t, func() { r.pods[uidA].sandbox = "" })
	w.write(t, "pod_1", "7")
	r.looked(t, w)
	kill()
	w.quiet <- nil
	r.soon(t, "the report", func() bool { return len(r.pods[uidA].reporting.exited) == 1 })
}

func TestHolderExitWithoutProofIsNotReported(t *testing.T) {
	for name, change := range map[string]func(*running, *writer){
		"a lock that nobody holds":  func(_ *running, w *writer) { w.holders.Store(&[]lock.Holder{lease("lock", "", "7")}) },
		"an unknown sandbox":        func(r *running, _ *writer) { r.pods[uidA].sandbox = "" },
		"an earlier agent's writes": func(r *running, _ *writer) { r.earlier.Add(uidA, make(chan struct{})) },
		"writes of a stranger":      func(r *running, _ *writer) { r.earlier.UnknownUntil = time.Now().Add(time.Hour) },
		"processes that are not seen": func(r *running, _ *writer) {
			_ = os.RemoveAll(filepath.Join(r.cgroups, "kubepods/pod"+uidA, "cri-operator"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, w := watched(t)
			kill := r.runs(t, "cri-operator")
			w.holders.Store(&[]lock.Holder{lease("lock", "pod_1", "7")})
			r.in(t, func() { change(r, w) })
			w.writeAll(t, w.Holders()...)
			r.looked(t, w)
			kill()
			select {
			case w.quiet <- nil:
				t.Fatal("it is taken for dead")
			case <-time.After(50 * time.Millisecond):
			}
		})
	}
}
