package pods

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const uid = "0a1b2c3d-1111-2222-3333-444455556666"

func TestProcessesFindsPodsUnderEitherCgroupDriver(t *testing.T) {
	systemd := "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b2c3d_1111_2222_3333_444455556666.slice/cri-containerd-aa.scope"
	for name, path := range map[string]string{
		"cgroupfs":            "kubepods/burstable/pod" + uid + "/aa",
		"cgroupfs guaranteed": "kubepods/pod" + uid + "/aa",
		"systemd":             systemd,
		"systemd guaranteed":  "kubepods.slice/kubepods-pod0a1b2c3d_1111_2222_3333_444455556666.slice/crio-aa.scope",
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			writeProcs(t, filepath.Join(root, path), 41, 42)
			writeProcs(t, filepath.Join(root, "kubepods/podffffffff-1111-2222-3333-444455556666/bb"), 43)
			writeProcs(t, filepath.Join(root, "system.slice/podless"), 44)

			got, err := (&Locator{cgroupRoot: root}).Find(map[string]bool{uid: true})

			require.NoError(t, err)
			require.Len(t, got, 1)
			assert.Equal(t, []int{41, 42}, got[uid].PIDs)
			info, err := os.Stat(filepath.Dir(filepath.Join(root, path)))
			require.NoError(t, err)
			assert.Equal(t, info.Sys().(*syscall.Stat_t).Ino, got[uid].Cgroup)

			all, err := (&Locator{cgroupRoot: root}).All()
			require.NoError(t, err)
			assert.Len(t, all, 2)
		})
	}
}

func TestProcessesOmitTheSandbox(t *testing.T) {
	root := t.TempDir()
	pod := filepath.Join(root, "kubepods/burstable/pod"+uid)
	writeProcs(t, filepath.Join(pod, "cri-containerd-5a5a.scope"), 40)
	writeProcs(t, filepath.Join(pod, "cri-containerd-aa.scope"), 41)
	writeProcs(t, filepath.Join(pod, "cri-containerd-bb.scope/inner"), 42)

	got, err := (&Locator{cgroupRoot: root}).Processes(uid, "5a5a")
	require.NoError(t, err)
	assert.Equal(t, []int{41, 42}, got)

	got, err = (&Locator{cgroupRoot: root}).Processes("another", "5a5a")
	require.NoError(t, err)
	assert.Empty(t, got)
}

func TestSandboxIsFoundByItsProcess(t *testing.T) {
	type process struct {
		pid     int
		started int
		program string
	}
	const sandbox, operator = "cri-containerd-5a5a.scope", "cri-containerd-aa.scope"
	for name, c := range map[string]struct {
		containers map[string][]process
		want       []int
	}{
		"the oldest":                {map[string][]process{operator: {{41, 20, "/manager"}, {42, 30, "/pause"}}, sandbox: {{40, 10, "/pause"}}}, []int{41, 42}},
		"of OpenShift":              {map[string][]process{operator: {{41, 20, "/manager"}}, sandbox: {{40, 10, "/usr/bin/pod"}}}, []int{41}},
		"no process of a sandbox":   {map[string][]process{operator: {{41, 20, "/manager"}}, sandbox: {{40, 10, "/sidecar"}}}, nil},
		"a container is older":      {map[string][]process{operator: {{41, 10, "/manager"}}, sandbox: {{40, 20, "/pause"}}}, nil},
		"as old as a container":     {map[string][]process{operator: {{41, 10, "/manager"}}, sandbox: {{40, 10, "/pause"}}}, nil},
		"it has a second process":   {map[string][]process{operator: {{41, 20, "/manager"}}, sandbox: {{40, 10, "/pause"}, {42, 30, "/x"}}}, nil},
		"a program of that name":    {map[string][]process{operator: {{41, 20, "/sidecar"}}, sandbox: {{40, 10, "/manager/pause"}}}, nil},
		"no process of a container": {map[string][]process{sandbox: {{40, 10, "/pause"}}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			root, proc := t.TempDir(), t.TempDir()
			for container, all := range c.containers {
				var pids []int
				for _, p := range all {
					pids = append(pids, p.pid)
					dir := filepath.Join(proc, strconv.Itoa(p.pid))
					require.NoError(t, os.Mkdir(dir, 0o755))
					stat := fmt.Sprintf("%d (a) b) S 1%s %d 0", p.pid, strings.Repeat(" 0", 17), p.started)
					require.NoError(t, os.WriteFile(filepath.Join(dir, "stat"), []byte(stat), 0o600))
					require.NoError(t, os.Symlink(p.program, filepath.Join(dir, "exe")))
				}
				writeProcs(t, filepath.Join(root, "kubepods/burstable/pod"+uid, container), pids...)
			}
			got, err := (&Locator{cgroupRoot: root, procDir: proc}).Processes(uid, "")
			require.NoError(t, err)
			assert.Equal(t, c.want, got)
		})
	}
}

// A runtime's process is in the pod's cgroup before it is in its namespace.
func TestOpenOmitsProcessesInTheNodesNetwork(t *testing.T) {
	l := newLocator(t)
	pid := sleeper(t)
	proc := fakeProc(t, l, pid, uid)

	ns, err := proc.Open(uid, []int{pid}, false, 0)
	require.NoError(t, err)
	assert.Nil(t, ns)

	ns, err = proc.Open(uid, []int{pid}, true, 0)
	require.NoError(t, err)
	defer ns.Close()
	assert.Equal(t, l.host, ns.Inode)
}

func TestOpenIgnoresProcessesOfOtherPods(t *testing.T) {
	l := newLocator(t)
	pid := sleeper(t)
	proc := fakeProc(t, l, pid, "another-pod")

	ns, err := proc.Open(uid, []int{pid, 1 << 30}, true, 0)

	require.NoError(t, err)
	assert.Nil(t, ns, "a reused process number must not lend its namespace")
}

// What a process makes for itself is not its pod's network, whatever its number.
func TestOpenIgnoresNamespacesThatProcessesCreate(t *testing.T) {
	dir := t.TempDir()
	l := &Locator{procDir: dir}
	show := func(pid, began int, ns string) {
		p := filepath.Join(dir, fmt.Sprint(pid))
		require.NoError(t, os.MkdirAll(filepath.Join(p, "ns"), 0o755))
		require.NoError(t, os.Symlink(filepath.Join(dir, ns), filepath.Join(p, "ns/net")))
		require.NoError(t, os.WriteFile(filepath.Join(p, "cgroup"), []byte("0::/kubepods/pod"+uid+"/aa\n"), 0o644))
		require.NoError(t, os.WriteFile(filepath.Join(p, "stat"), fmt.Appendf(nil, "%d (a) (b c) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0\n", pid, began), 0o644))
	}
	inodes := map[string]uint64{}
	for _, ns := range []string{"pods", "own"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, ns), nil, 0o644))
		var err error
		inodes[ns], err = inode(os.Stat(filepath.Join(dir, ns)))
		require.NoError(t, err)
	}
	show(7, 300, "own")
	show(8, 200, "pods")
	show(9, 400, "own")

	for captured, want := range map[string]string{"": "pods", "pods": "pods", "own": "own"} {
		ns, err := l.Open(uid, []int{7, 8, 9, 1 << 30}, false, inodes[captured])
		require.NoError(t, err)
		assert.Equal(t, inodes[want], ns.Inode, "captured: %q", captured)
		ns.Close()
	}
}

func TestHeldProcessRunsUntilItExits(t *testing.T) {
	l := &Locator{procDir: "/proc"}
	own, err := inode(os.Stat("/proc/self/ns/net"))
	require.NoError(t, err)
	child := exec.CommandContext(t.Context(), "sleep", "600")
	require.NoError(t, child.Start())
	held := l.Hold(child.Process.Pid, own)
	self := l.Hold(os.Getpid(), own)
	require.Equal(t, []bool{true, false, true}, Running([]*Process{self, nil, held}))
	require.Nil(t, l.Hold(child.Process.Pid, own+1), "it is in another namespace")

	require.NoError(t, child.Process.Kill())
	_ = child.Wait()
	require.Equal(t, []bool{true, false, false}, Running([]*Process{self, nil, held}))
	require.Nil(t, l.Hold(child.Process.Pid, own), "it has exited")
	require.False(t, (*Process)(nil).Runs())
}

// newLocator takes this process's network for the node's.
func newLocator(t *testing.T) *Locator {
	t.Helper()
	host, err := inode(os.Stat("/proc/self/ns/net"))
	require.NoError(t, err)
	return &Locator{host: host}
}

// fakeProc shows a real process's namespace under a cgroup of our choice.
func fakeProc(t *testing.T, l *Locator, pid int, uid string) *Locator {
	t.Helper()
	dir := t.TempDir()
	p := filepath.Join(dir, fmt.Sprint(pid))
	require.NoError(t, os.MkdirAll(filepath.Join(p, "ns"), 0o755))
	require.NoError(t, os.Symlink(fmt.Sprintf("/proc/%d/ns/net", pid), filepath.Join(p, "ns/net")))
	require.NoError(t, os.Symlink(fmt.Sprintf("/proc/%d/stat", pid), filepath.Join(p, "stat")))
	require.NoError(t, os.WriteFile(filepath.Join(p, "cgroup"), []byte("0::/kubepods/pod"+uid+"/aa\n"), 0o644))
	return &Locator{cgroupRoot: l.cgroupRoot, procDir: dir, own: l.own, host: l.host}
}

func TestOwnsKnowsBothCgroupDrivers(t *testing.T) {
	l := &Locator{procDir: t.TempDir()}
	write := func(pid int, cgroup string) {
		dir := filepath.Join(l.procDir, strconv.Itoa(pid))
		require.NoError(t, os.MkdirAll(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup"), []byte(cgroup), 0o644))
	}
	const other = "ffffffff-1111-2222-3333-444455556666"
	write(1, "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod"+strings.ReplaceAll(uid, "-", "_")+".slice/cri-1.scope\n")
	write(2, "0::/kubepods/pod"+uid+"/1\n")
	write(3, "0::/system.slice/sshd.service\n")
	for pid, want := range map[int]bool{1: true, 2: true, 3: false} {
		owns, err := l.Owns(uid, pid)
		require.NoError(t, err)
		require.Equal(t, want, owns, pid)
		owns, err = l.Owns(other, pid)
		require.NoError(t, err)
		require.False(t, owns)
	}
	_, err := l.Owns(uid, 4)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func sleeper(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("sleep", "60")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd.Process.Pid
}

func writeProcs(t *testing.T, dir string, pids ...int) {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0o755))
	var b []byte
	for _, p := range pids {
		b = fmt.Appendf(b, "%d\n", p)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), b, 0o644))
}
