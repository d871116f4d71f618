package bpf_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
)

var (
	elsewhere4 = netip.MustParseAddrPort("198.18.254.1:8443")
	elsewhere6 = netip.MustParseAddrPort("[fd00:18::9]:8443")
	plain4     = netip.MustParseAddrPort("198.18.254.1:80")

	everyWayElsewhere = map[string]struct {
		client
		to netip.AddrPort
	}{
		"v4":        {to: elsewhere4},
		"v6":        {to: elsewhere6},
		"v4-mapped": {client: client{mapped: true}, to: elsewhere4},
	}
)

// accepter says of each connection where it was meant to go.
func accepter(t *testing.T, r *bpf.Redirect, cookie uint64) (port uint16, went chan netip.AddrPort, stop func()) {
	t.Helper()
	went = make(chan netip.AddrPort, 10000)
	listen := func(at string) *net.TCPListener {
		var config net.ListenConfig
		config.SetMultipathTCP(false)
		l, err := config.Listen(t.Context(), "tcp", at)
		require.NoError(t, err)
		return l.(*net.TCPListener)
	}
	v4 := listen("127.0.0.1:0")
	port = uint16(v4.Addr().(*net.TCPAddr).Port)
	v6 := listen(fmt.Sprintf("[::1]:%d", port))
	for _, l := range []*net.TCPListener{v4, v6} {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				to, ok, err := r.TakeOrigin(cookie, c.RemoteAddr().(*net.TCPAddr).AddrPort(), port)
				if err != nil || !ok {
					to = netip.AddrPort{}
				}
				went <- to
				c.Close()
			}
		}()
	}
	stop = func() {
		v4.Close()
		v6.Close()
	}
	t.Cleanup(stop)
	return port, went, stop
}

// send sends a datagram: by a connected socket, or by one that is not.
func send(to netip.AddrPort, mapped, connected bool) error {
	family := unix.AF_INET
	if to.Addr().Is6() || mapped {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if connected {
		return unix.Connect(fd, sockaddr(to, family))
	}
	return unix.Sendto(fd, []byte("x"), 0, sockaddr(to, family))
}

func TestEgress(t *testing.T) {
	r := open(t, bpftest.Cgroup(t), bpftest.BPFFS(t))
	require.NoError(t, r.Egress())
	cookie := namespace(t)
	main, _ := listen(t)
	port, went, stop := accepter(t, r, cookie)
	require.NoError(t, r.SetDestinations([]netip.AddrPort{service4, service6}))
	pod := bpf.Pod{UID: [16]byte{1}, Port: main}
	require.NoError(t, r.SetPod(cookie, pod))
	uid := pod.UID
	direct := func(why string) {
		t.Helper()
		for name, way := range everyWayElsewhere {
			_, err := way.connect(way.to)
			require.ErrorIs(t, err, unix.ENETUNREACH, "%s: %s", name, why)
			for _, connected := range []bool{true, false} {
				require.ErrorIs(t, send(way.to, way.mapped, connected), unix.ENETUNREACH, "%s by UDP: %s", name, why)
			}
		}
	}
	turned := func(why string) {
		t.Helper()
		for name, way := range everyWayElsewhere {
			peer, err := way.connect(way.to)
			require.NoError(t, err, "%s: %s", name, why)
			require.Equal(t, way.to, <-went, name)
			require.Equal(t, way.to, netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port()), "%s: the peer it sees", name)
			for _, connected := range []bool{true, false} {
				require.ErrorIs(t, send(way.to, way.mapped, connected), unix.EPERM, "%s by UDP: %s", name, why)
			}
		}
	}

	direct("never set")
	require.NoError(t, r.SetEgress(uid, []uint16{443, 8443}, []netip.Addr{netip.MustParseAddr("198.18.254.7"), netip.MustParseAddr("fd00:18::7")}))
	direct("no listener yet")
	pod.Egress = port
	require.NoError(t, r.SetPod(cookie, pod))
	got, _, err := r.Pod(cookie)
	require.NoError(t, err)
	require.Equal(t, pod, got)
	turned("set")

	requireRedirected(t, "the apiserver's stay with their own listener")
	require.Empty(t, went)
	for _, way := range everyWayElsewhere {
		_, err := client{mapped: way.mapped, prepare: r.MarkSocket}.connect(way.to)
		require.ErrorIs(t, err, unix.ENETUNREACH, "the agent's own")
		_, err = client{mapped: way.mapped, prepare: toDevice}.connect(way.to)
		require.ErrorIs(t, err, unix.EPERM, "bound to a device")
	}
	for _, own := range []string{"198.18.254.7:8443", "[fd00:18::7]:8443", "198.18.254.1:8444", "198.18.254.1:80"} {
		_, err := client{}.connect(netip.MustParseAddrPort(own))
		require.ErrorIs(t, err, unix.ENETUNREACH, own)
	}
	for _, local := range []string{"127.0.0.1:8443", "127.9.9.9:443", "[::1]:8443", "0.0.0.0:443", "[::]:443", "[::ffff:127.0.0.1]:443"} {
		_, err := client{}.connect(netip.MustParseAddrPort(local))
		require.ErrorIs(t, err, unix.ECONNREFUSED, local)
	}
	require.NotErrorIs(t, send(netip.MustParseAddrPort("127.0.0.1:443"), false, false), unix.EPERM)
	require.NotErrorIs(t, send(netip.MustParseAddrPort("198.18.254.1:53"), false, false), unix.EPERM)

	// Who connects to the listener itself is nobody's.
	_, err = client{}.connect(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port))
	require.NoError(t, err)
	require.Equal(t, netip.AddrPort{}, <-went)

	// Other ports.
	require.NoError(t, r.SetEgress(uid, []uint16{80, 8443}, nil))
	turned("stays")
	_, err = client{}.connect(plain4)
	require.NoError(t, err)
	require.Equal(t, plain4, <-went)
	_, err = client{}.connect(netip.MustParseAddrPort("198.18.254.1:443"))
	require.ErrorIs(t, err, unix.ENETUNREACH, "a port no more")
	has, err := r.HasEgress(uid, []uint16{80, 8443})
	require.NoError(t, err)
	require.True(t, has)
	has, err = r.HasEgress(uid, []uint16{80, 443})
	require.NoError(t, err)
	require.False(t, has)
	ports, err := r.EgressPorts(uid)
	require.NoError(t, err)
	require.Equal(t, []uint16{80, 8443}, ports)

	// Another pod's ports are not this one's.
	require.NoError(t, r.SetEgress([16]byte{2}, []uint16{444}, nil))
	_, err = client{}.connect(other4)
	require.ErrorIs(t, err, unix.ENETUNREACH)

	require.NoError(t, r.Sweep(func(uid [16]byte) bool { return uid == [16]byte{1} }))
	ports, err = r.EgressPorts([16]byte{2})
	require.NoError(t, err)
	require.Empty(t, ports)
	turned("after a sweep")

	// Without an agent.
	stop()
	_, err = client{}.connect(elsewhere4)
	require.ErrorIs(t, err, unix.ECONNREFUSED, "nobody listens")
	require.ErrorIs(t, send(elsewhere4, false, false), unix.EPERM)
	pod.Open = true
	require.NoError(t, r.SetPod(cookie, pod))
	r.Beat()
	direct("open, and nobody listens")

	pod.Open, pod.Egress = false, 0
	require.NoError(t, r.SetPod(cookie, pod))
	direct("ended")
	require.NoError(t, r.SetEgress(uid, nil, nil))
	requireRedirected(t, "the apiserver still")
}

// TestEgressOfPodsOfTheNode are told apart by their cgroups.
func TestEgressOfPodsOfTheNode(t *testing.T) {
	cgroup := bpftest.Cgroup(t)
	r := open(t, cgroup, bpftest.BPFFS(t))
	cookie := namespace(t)
	main, _ := listen(t)
	port, went, _ := accepter(t, r, cookie)
	require.NoError(t, r.SetHost(cookie))
	for _, name := range []string{"one", "two"} {
		dir := filepath.Join(cgroup, name)
		bpftest.MakeCgroup(t, dir)
	}
	t.Cleanup(func() { join(t, cgroup) })
	pod := bpf.Pod{UID: [16]byte{1}, Port: main, Egress: port}
	require.NoError(t, r.SetEgress(pod.UID, []uint16{8443}, nil))
	require.NoError(t, r.SetCgroup(inode(t, filepath.Join(cgroup, "one")), pod))
	require.NoError(t, r.SetCgroup(inode(t, filepath.Join(cgroup, "two")), bpf.Pod{UID: [16]byte{2}, Port: main}))
	for _, way := range everyWayElsewhere {
		join(t, filepath.Join(cgroup, "one"))
		_, err := way.connect(way.to)
		require.NoError(t, err)
		require.Equal(t, way.to, <-went)
		require.ErrorIs(t, send(way.to, way.mapped, false), unix.EPERM)
		for _, other := range []string{filepath.Join(cgroup, "two"), cgroup} {
			join(t, other)
			_, err = way.connect(way.to)
			require.ErrorIs(t, err, unix.ENETUNREACH)
			require.ErrorIs(t, send(way.to, way.mapped, false), unix.ENETUNREACH)
		}
	}
}

// TestOriginsAreRight though many connect at once, to different destinations.
func TestOriginsAreRight(t *testing.T) {
	r := open(t, bpftest.Cgroup(t), bpftest.BPFFS(t))
	cookie := namespace(t)
	netns, err := os.Open("/proc/thread-self/ns/net")
	require.NoError(t, err)
	defer netns.Close()
	port, went, _ := accepter(t, r, cookie)
	require.NoError(t, r.SetPod(cookie, bpf.Pod{UID: [16]byte{1}, Port: 1, Egress: port}))
	require.NoError(t, r.SetEgress([16]byte{1}, []uint16{8443}, nil))

	const workers, each = 16, 100
	var mu sync.Mutex
	meant := map[netip.AddrPort]int{}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			// The thread goes with the goroutine.
			lockInto(t, netns)
			for i := range each {
				to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, 100 + byte(w), byte(1 + i%50)}), 8443)
				c := client{mapped: i%2 == 0}
				if i%5 == 0 {
					to = netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf("fd00:18::%x:%x", w+1, i)), 8443)
				}
				if _, err := c.connect(to); err != nil {
					t.Error(err)
				}
				mu.Lock()
				meant[to]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for range workers * each {
		to := <-went
		meant[to]--
		if meant[to] == 0 {
			delete(meant, to)
		}
	}
	require.Empty(t, meant, "where connections were meant to go, and went")
}
