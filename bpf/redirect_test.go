package bpf_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

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
	pod := bpf.Pod{UID: [16]byte{1, 2, 3}, Port: 1234}
	require.NoError(t, first.SetPod(bpf.ByCookie(7), pod))
	require.NoError(t, first.Close())

	second := open(t, cgroup, dir)
	got, ok, err := second.Pod(bpf.ByCookie(7))
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, pod, got)

	require.NoError(t, second.DeletePod(bpf.ByCookie(7)))
	require.NoError(t, second.DeletePod(bpf.ByCookie(7)), "deleting twice")
	_, ok, err = second.Pod(bpf.ByCookie(7))
	require.NoError(t, err)
	require.False(t, ok)
}

// hooks is the number of programs.
const hooks = 7

// attached counts the programs at the hooks of the cgroup.
func attached(t *testing.T, cgroup string) int {
	t.Helper()
	f, err := os.Open(cgroup)
	require.NoError(t, err)
	defer f.Close()
	n := 0
	for _, hook := range []ebpf.AttachType{
		ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect,
		ebpf.AttachCgroupInet4GetPeername, ebpf.AttachCgroupInet6GetPeername,
		ebpf.AttachCGroupSockOps, ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupUDP6Sendmsg,
	} {
		result, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: hook})
		require.NoError(t, err)
		n += len(result.Programs)
	}
	return n
}

// requireAttached waits until n programs are attached to the cgroup: the kernel frees unused
// links late.
func requireAttached(t *testing.T, cgroup string, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return attached(t, cgroup) == n }, 30*time.Second, time.Millisecond, "%d, not %d", attached(t, cgroup), n)
}

func TestLinksAreReplacedAndRemoved(t *testing.T) {
	cgroup, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	require.NoError(t, bpf.Remove(dir), "nothing to remove")
	require.NoFileExists(t, dir)

	for range 3 {
		require.NoError(t, open(t, cgroup, dir).Close())
		requireAttached(t, cgroup, hooks)
	}

	// A link of another cgroup is replaced.
	child := filepath.Join(cgroup, "child")
	require.NoError(t, os.Mkdir(child, 0o755))
	defer os.Remove(child)
	require.NoError(t, open(t, child, dir).Close())
	requireAttached(t, child, hooks)
	requireAttached(t, cgroup, 0)
	// So is the link of a removed cgroup.
	require.NoError(t, os.Remove(child))
	require.NoError(t, open(t, cgroup, dir).Close())
	requireAttached(t, cgroup, hooks)

	holder := open(t, cgroup, dir)
	require.NoError(t, bpf.Remove(dir))
	requireAttached(t, cgroup, 0)
	require.NoFileExists(t, dir)
	require.NoError(t, holder.Close())
}

func TestUnsupportedNodeIsReported(t *testing.T) {
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

func TestExclusiveHookIsReported(t *testing.T) {
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

			requireAttached(t, cgroup, 1)
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

var (
	service4 = netip.MustParseAddrPort("198.18.255.1:443")
	service6 = netip.MustParseAddrPort("[fd00:18::1]:443")
	other4   = netip.MustParseAddrPort("198.18.255.1:444")
)

// namespace moves the test to a network namespace that has only lo, and returns its cookie.
// Connections that are not redirected have no route.
func namespace(t testing.TB) uint64 {
	t.Helper()
	runtime.LockOSThread() // and never unlock: the thread exits with the test
	require.NoError(t, unix.Unshare(unix.CLONE_NEWNET))
	lo, err := netlink.LinkByName("lo")
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetUp(lo))
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	require.NoError(t, err)
	return cookie
}

// lockInto moves the calling goroutine to a network namespace and locks it to its thread.
func lockInto(t *testing.T, netns *os.File) {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
		t.Error(err)
	}
}

// listen listens on 127.0.0.1 and ::1, on the same port.
func listen(t *testing.T) (port uint16, stop func()) {
	t.Helper()
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	v4, err := config.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	port = uint16(v4.Addr().(*net.TCPAddr).Port)
	v6, err := config.Listen(t.Context(), "tcp6", netip.AddrPortFrom(netip.IPv6Loopback(), port).String())
	require.NoError(t, err)
	stop = func() {
		v4.Close()
		v6.Close()
	}
	t.Cleanup(stop)
	return port, stop
}

// client is a kind of TCP client.
type client struct {
	mapped  bool // by an IPv6 socket to an IPv4 address
	prepare func(fd int) error
}

// connect connects in the calling thread's network namespace and returns the peer that the client sees.
func (c client) connect(to netip.AddrPort) (peer netip.AddrPort, err error) {
	family := unix.AF_INET
	if to.Addr().Is6() || c.mapped {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return peer, err
	}
	defer unix.Close(fd)
	if c.prepare != nil {
		if err := c.prepare(fd); err != nil {
			return peer, err
		}
	}
	if err := unix.Connect(fd, sockaddr(to, family)); err != nil {
		return peer, err
	}
	at, err := unix.Getpeername(fd)
	if err != nil {
		return peer, err
	}
	return addrPort(at), nil
}

func sockaddr(to netip.AddrPort, family int) unix.Sockaddr {
	if family == unix.AF_INET {
		return &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	return &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
}

func addrPort(at unix.Sockaddr) netip.AddrPort {
	switch at := at.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(at.Addr), uint16(at.Port))
	}
	return netip.AddrPort{}
}

// everyWay has a client for every family of socket and destination.
var everyWay = map[string]struct {
	client
	to netip.AddrPort
}{
	"v4":        {to: service4},
	"v6":        {to: service6},
	"v4-mapped": {client: client{mapped: true}, to: service4},
}

// redirected returns an error unless clients of every kind reach the listener.
func redirected() error {
	for name, way := range everyWay {
		if _, err := way.connect(way.to); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// requireRedirected requires that clients of every kind reach the listener.
func requireRedirected(t *testing.T, why string) {
	t.Helper()
	require.NoError(t, redirected(), why)
}

// patience is PATIENCE of heartbeat.h.
const patience = 2 * time.Second

// requireWhileAlive requires that f succeeds after a heartbeat. If the machine stalled for so
// long that the heartbeat was old before f returned, it tries again.
func requireWhileAlive(t *testing.T, beat func() bool, f func() error, why string) {
	t.Helper()
	for {
		began := time.Now()
		beat()
		err := f()
		if took := time.Since(began); took >= patience {
			t.Logf("%s: the machine stalled for %s: %v", why, took, err)
			continue
		}
		require.NoError(t, err, why)
		return
	}
}

// requireLapse gives a heartbeat and connects until it is old: each connection must be
// redirected that began and ended before, and none after.
func requireLapse(t *testing.T, r *bpf.Redirect) {
	t.Helper()
	earliest := time.Now()
	r.Beat()
	latest := time.Now()
	for {
		began := time.Now()
		_, err := client{}.connect(service4)
		ended := time.Now()
		if err != nil {
			require.ErrorIs(t, err, unix.ENETUNREACH)
			require.Greater(t, ended.Sub(earliest), patience, "direct after a heartbeat")
			return
		}
		require.LessOrEqual(t, began.Sub(latest), patience, "redirected, but the heartbeat is old")
		time.Sleep(10 * time.Millisecond)
	}
}

// requireDirect requires that no client is redirected.
func requireDirect(t *testing.T, why string) {
	t.Helper()
	for name, way := range everyWay {
		_, err := way.connect(way.to)
		require.ErrorIs(t, err, unix.ENETUNREACH, "%s: %s", name, why)
	}
}

func toDevice(fd int) error {
	return unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "lo")
}

func TestConnectsOfEveryKindAreDecided(t *testing.T) {
	r := open(t, bpftest.Cgroup(t), bpftest.BPFFS(t))
	cookie := namespace(t)
	port, stop := listen(t)

	require.NoError(t, r.SetDestinations([]netip.AddrPort{service4, service6}))
	requireDirect(t, "unknown pod")
	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), bpf.Pod{Port: port}))

	requireRedirected(t, "never a heartbeat")
	for _, way := range everyWay {
		_, err := client{mapped: way.mapped, prepare: r.MarkSocket}.connect(way.to)
		require.ErrorIs(t, err, unix.ENETUNREACH, "the agent's own")
		_, err = client{mapped: way.mapped, prepare: toDevice}.connect(way.to)
		require.ErrorIs(t, err, unix.EPERM, "bound to a device")
	}

	_, err := client{}.connect(other4)
	require.ErrorIs(t, err, unix.ENETUNREACH, "another port")
	require.NoError(t, r.SetDestinations([]netip.AddrPort{other4}))
	_, err = client{}.connect(other4)
	require.NoError(t, err, "listed now")
	requireDirect(t, "listed no more")

	stop()
	_, err = client{}.connect(other4)
	require.ErrorIs(t, err, unix.ECONNREFUSED, "nothing listens")
	require.NoError(t, r.DeletePod(bpf.ByCookie(cookie)))
	_, err = client{}.connect(other4)
	require.ErrorIs(t, err, unix.ENETUNREACH, "let go")

	require.Error(t, r.MarkSocket(int(os.Stderr.Fd())), "not a socket")
}

func TestOpenPodsGoDirectWithoutAgent(t *testing.T) {
	r := open(t, bpftest.Cgroup(t), bpftest.BPFFS(t))
	cookie := namespace(t)
	port, stop := listen(t)
	require.NoError(t, r.SetDestinations([]netip.AddrPort{service4, service6}))
	pod := bpf.Pod{Port: port, Open: true}
	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), pod))

	requireDirect(t, "never a heartbeat")
	bound := func() error {
		_, err := client{prepare: func(fd int) error {
			require.NoError(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Usec: 50_000}))
			return toDevice(fd)
		}}.connect(service4)
		return err
	}
	require.ErrorIs(t, bound(), unix.EINPROGRESS, "it goes direct: lo does not have that address")
	requireWhileAlive(t, r.Beat, redirected, "alive")
	requireWhileAlive(t, r.Beat, func() error {
		if err := bound(); !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("unexpected result: %w", err)
		}
		return nil
	}, "bound to a device it cannot be redirected, and does not go around")

	requireLapse(t, r)
	requireDirect(t, "the last heartbeat is old")
	requireWhileAlive(t, r.Beat, redirected, "back")

	pod.Stalled = true
	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), pod))
	requireDirect(t, "stalled")
	got, _, err := r.Pod(bpf.ByCookie(cookie))
	require.NoError(t, err)
	require.Equal(t, pod, got)
	pod.Open = false
	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), pod))
	requireRedirected(t, "stalled, but not open")
	pod.Open, pod.Stalled = true, false
	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), pod))

	stop()
	r.Beat()
	requireDirect(t, "nothing listens")
	connected, err := net.Listen("tcp4", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String())
	require.NoError(t, err)
	defer connected.Close()
	requireWhileAlive(t, r.Beat, func() error { _, err := client{}.connect(service4); return err }, "a process listens")
	_, err = client{}.connect(service6)
	require.ErrorIs(t, err, unix.ENETUNREACH, "but not there")
}

func TestHostNetworkPodsByCgroup(t *testing.T) {
	cgroup := bpftest.Cgroup(t)
	r := open(t, cgroup, bpftest.BPFFS(t))
	require.NoError(t, r.HostNetwork())
	cookie := namespace(t)
	port, stop := listen(t)
	require.NoError(t, r.SetDestinations([]netip.AddrPort{service4, service6}))
	require.NoError(t, r.SetHost(cookie))

	deep := filepath.Clean(strings.Repeat("deep/", 12))
	for _, dir := range []string{"pod/container", "other", deep} {
		require.NoError(t, os.MkdirAll(filepath.Join(cgroup, dir), 0o755))
	}
	t.Cleanup(func() {
		join(t, cgroup)
		for _, dir := range []string{"pod/container", "other", deep} {
			for ; dir != "."; dir = filepath.Dir(dir) {
				require.NoError(t, os.Remove(filepath.Join(cgroup, dir)))
			}
		}
	})
	pod := bpf.Pod{UID: [16]byte{1}, Port: port}
	require.NoError(t, r.SetPod(bpf.ByCgroup(inode(t, filepath.Join(cgroup, "pod"))), pod))

	requireDirect(t, "not in the pod")
	join(t, filepath.Join(cgroup, "pod/container"))
	requireRedirected(t, "in the pod")
	_, err := client{prepare: r.MarkSocket}.connect(service4)
	require.ErrorIs(t, err, unix.ENETUNREACH, "the agent's own")
	join(t, filepath.Join(cgroup, "pod"))
	requireRedirected(t, "in the pod itself")
	join(t, filepath.Join(cgroup, "other"))
	requireDirect(t, "in another pod")
	join(t, filepath.Join(cgroup, deep))
	requireDirect(t, "far below")
	require.NoError(t, r.SetPod(bpf.ByCgroup(inode(t, filepath.Join(cgroup, deep))), pod))
	requireRedirected(t, "deeper than is looked for, but right there")

	join(t, filepath.Join(cgroup, "pod/container"))
	pod.Open = true
	require.NoError(t, r.SetPod(bpf.ByCgroup(inode(t, filepath.Join(cgroup, "pod"))), pod))
	requireDirect(t, "open, without a heartbeat")
	requireWhileAlive(t, r.Beat, redirected, "open")
	stop()
	requireDirect(t, "open, and nothing listens")

	require.NoError(t, r.Sweep(func([16]byte) bool { return false }))
	_, there, err := r.Pod(bpf.ByCgroup(inode(t, filepath.Join(cgroup, "pod"))))
	require.NoError(t, err)
	require.False(t, there)
	requireDirect(t, "let go")
}

func join(t testing.TB, cgroup string) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte("0"), 0))
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(path, &st))
	return st.Ino
}

func TestClientsSeeDialledAddress(t *testing.T) {
	r := open(t, bpftest.Cgroup(t), bpftest.BPFFS(t))
	require.Empty(t, r.Lacks())
	cookie := namespace(t)
	port, _ := listen(t)
	require.NoError(t, r.SetDestinations([]netip.AddrPort{service4, service6}))
	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), bpf.Pod{Port: port}))

	for name, way := range everyWay {
		peer, err := way.connect(way.to)
		require.NoError(t, err)
		want := way.to
		if way.mapped {
			want = netip.AddrPortFrom(netip.AddrFrom16(want.Addr().As16()), want.Port())
		}
		require.Equal(t, want, peer, name)
	}
	here := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
	peer, err := client{}.connect(here)
	require.NoError(t, err)
	require.Equal(t, here, peer, "not redirected")

	// A socket that was redirected and is reused for another destination.
	elsewhere, _ := listen(t)
	there := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), elsewhere)
	peer, err = client{prepare: func(fd int) error {
		if err := unix.Connect(fd, sockaddr(service4, unix.AF_INET)); err != nil {
			return err
		}
		return disconnect(fd)
	}}.connect(there)
	require.NoError(t, err)
	require.Equal(t, there, peer, "redirected before")
}

// disconnect makes a connected socket one that can be connected again.
func disconnect(fd int) error {
	unspecified := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	_, _, code := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&unspecified)), unsafe.Sizeof(unspecified))
	if code != 0 {
		return code
	}
	return nil
}
