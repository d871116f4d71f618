package bpf_test

import (
	"context"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
)

func TestMain(m *testing.M) { bpftest.Main(m) }

func open(t *testing.T, cgroup, dir string) *bpf.Redirect {
	t.Helper()
	r, err := bpf.Open(cgroup, dir)
	require.NoError(t, err)
	t.Cleanup(func() { r.Close() })
	return r
}

func TestMapsAreTakenOver(t *testing.T) {
	cgroup, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	first := open(t, cgroup, dir)
	pods, err := first.Pods()
	require.NoError(t, err)
	require.Empty(t, pods)

	pod := bpf.Pod{UID: [16]byte{1, 2, 3}, Port: 1234}
	require.NoError(t, first.SetPod(7, pod))
	require.NoError(t, first.Close())

	second := open(t, cgroup, dir)
	pods, err = second.Pods()
	require.NoError(t, err)
	require.Equal(t, map[uint64]bpf.Pod{7: pod}, pods)
	got, ok, err := second.Pod(7)
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, pod, got)

	require.NoError(t, second.DeletePod(7))
	require.NoError(t, second.DeletePod(7), "deleting twice")
	_, ok, err = second.Pod(7)
	require.NoError(t, err)
	require.False(t, ok)
}

// attached counts the programs at the connect hooks of the cgroup.
func attached(t *testing.T, cgroup string) int {
	t.Helper()
	f, err := os.Open(cgroup)
	require.NoError(t, err)
	defer f.Close()
	n := 0
	for _, hook := range []ebpf.AttachType{ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect} {
		result, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: hook})
		require.NoError(t, err)
		n += len(result.Programs)
	}
	return n
}

func TestLinksAreReplacedAndRemoved(t *testing.T) {
	cgroup, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	require.NoError(t, bpf.Remove(dir), "nothing to remove")
	require.NoFileExists(t, dir)

	for range 3 {
		require.NoError(t, open(t, cgroup, dir).Close())
		require.Equal(t, 2, attached(t, cgroup))
	}

	// A link at another cgroup is ours no more: it is replaced.
	child := filepath.Join(cgroup, "child")
	require.NoError(t, os.Mkdir(child, 0o755))
	defer os.Remove(child)
	require.NoError(t, open(t, child, dir).Close())
	require.Equal(t, 2, attached(t, child))
	require.Equal(t, 0, attached(t, cgroup))
	// ... and so is one whose cgroup has gone.
	require.NoError(t, os.Remove(child))
	require.NoError(t, open(t, cgroup, dir).Close())
	require.Equal(t, 2, attached(t, cgroup))

	holder := open(t, cgroup, dir)
	require.NoError(t, bpf.Remove(dir))
	require.Equal(t, 0, attached(t, cgroup), "detached while somebody holds it")
	require.NoFileExists(t, dir)
	require.NoError(t, holder.Close())
}

func TestUnsupported(t *testing.T) {
	cgroup, fs := bpftest.Cgroup(t), bpftest.BPFFS(t)

	_, err := bpf.Open(cgroup, t.TempDir())
	require.ErrorIs(t, err, bpf.ErrUnsupported)
	require.ErrorContains(t, err, "is not on a bpffs")

	_, err = bpf.Open(t.TempDir(), fs)
	require.ErrorIs(t, err, bpf.ErrUnsupported)
	require.ErrorContains(t, err, "unified cgroup hierarchy")
}

// own attaches a program that tolerates no other to the hook of the cgroup, until the test ends.
func own(t *testing.T, cgroup string, hook ebpf.AttachType) {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.CGroupSockAddr,
		AttachType:   hook,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	require.NoError(t, err)
	t.Cleanup(func() { program.Close() })
	f, err := os.Open(cgroup)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	require.NoError(t, link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(f.Fd()), Program: program, Attach: hook}))
	t.Cleanup(func() {
		require.NoError(t, link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(f.Fd()), Program: program, Attach: hook}))
	})
}

func TestHookOwned(t *testing.T) {
	for name, hook := range map[string]ebpf.AttachType{
		"connect4": ebpf.AttachCGroupInet4Connect,
		"connect6": ebpf.AttachCGroupInet6Connect, // the second to be attached: the first must be undone
	} {
		t.Run(name, func(t *testing.T) {
			cgroup, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
			own(t, cgroup, hook)
			_, err := bpf.Open(cgroup, dir)
			require.ErrorIs(t, err, bpf.ErrHookOwned)
			require.ErrorIs(t, err, bpf.ErrUnsupported)
			require.ErrorIs(t, err, unix.EPERM)

			require.Equal(t, 1, attached(t, cgroup), "only the owner's program")
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

// TestVerdicts connects in a network namespace with nothing but lo: what is not redirected finds no route.
func TestVerdicts(t *testing.T) {
	r := open(t, bpftest.Cgroup(t), bpftest.BPFFS(t))
	runtime.LockOSThread() // and never unlock: the thread goes with the test
	require.NoError(t, unix.Unshare(unix.CLONE_NEWNET))
	lo, err := netlink.LinkByName("lo")
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetUp(lo))

	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	pod := bpf.Pod{Port: uint16(listener.Addr().(*net.TCPAddr).Port)}

	service := netip.MustParseAddrPort("198.18.255.1:443")
	require.NoError(t, r.SetDestinations([]netip.AddrPort{service}))
	require.ErrorIs(t, connect(service, nil), unix.ENETUNREACH, "unknown pod")
	require.NoError(t, r.SetPod(cookie(t), pod))

	require.NoError(t, connect(service, nil), "redirected")
	require.ErrorIs(t, connect(service, r.MarkSocket), unix.ENETUNREACH, "the agent's own")
	require.ErrorIs(t, connect(service, func(fd int) error {
		return unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "lo")
	}), unix.EPERM, "bound to a device")

	other := netip.MustParseAddrPort("198.18.255.1:444")
	require.ErrorIs(t, connect(other, nil), unix.ENETUNREACH, "another port")
	require.NoError(t, r.SetDestinations([]netip.AddrPort{other}))
	require.NoError(t, connect(other, nil), "listed now")
	require.ErrorIs(t, connect(service, nil), unix.ENETUNREACH, "listed no more")

	require.NoError(t, listener.Close())
	require.ErrorIs(t, connect(other, nil), unix.ECONNREFUSED, "nobody listens")
	require.NoError(t, r.DeletePod(cookie(t)))
	require.ErrorIs(t, connect(other, nil), unix.ENETUNREACH, "let go")

	require.Error(t, r.MarkSocket(int(os.Stderr.Fd())), "not a socket")
}

// connect connects in the calling thread's network namespace, by a socket that prepare has seen.
func connect(to netip.AddrPort, prepare func(fd int) error) error {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if prepare == nil {
			return nil
		}
		if cerr := c.Control(func(fd uintptr) { err = prepare(int(fd)) }); cerr != nil {
			return cerr
		}
		return err
	}}
	conn, err := d.DialTCP(context.Background(), "tcp4", netip.AddrPort{}, to)
	if err == nil {
		conn.Close()
	}
	return err
}

func cookie(t *testing.T) uint64 {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	require.NoError(t, err)
	return c
}
