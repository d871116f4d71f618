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

// accepter accepts connections and sends the original destination of each, which is empty if
// the client connected to the listener itself.
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

// send sends a datagram, by a connected socket or by an unconnected one.
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

// TestEgressPortsAreRedirected has one pod whose connections to other hosts are redirected. Its steps run on
// one thread, in the pod's network namespace, and each depends on those before it.
func TestEgressPortsAreRedirected(t *testing.T) {
	e := newEgressTest(t)
	e.direct("never set")
	require.NoError(t, e.r.SetEgress(e.pod.UID, []uint16{443, 8443}, []netip.Addr{netip.MustParseAddr("198.18.254.7"), netip.MustParseAddr("fd00:18::7")}))
	e.direct("no listener yet")
	e.pod.Egress = e.port
	require.NoError(t, e.r.SetPod(bpf.ByCookie(e.cookie), e.pod))
	got, _, err := e.r.Pod(bpf.ByCookie(e.cookie))
	require.NoError(t, err)
	require.Equal(t, e.pod, got)
	e.redirected("set")

	e.exceptions()
	e.otherPorts()
	e.otherPods()
	e.withoutAgent()

	e.pod.Open, e.pod.Egress = false, 0
	require.NoError(t, e.r.SetPod(bpf.ByCookie(e.cookie), e.pod))
	e.direct("ended")
	require.NoError(t, e.r.SetEgress(e.pod.UID, nil, nil))
	requireRedirected(t, "the apiserver still")
}

// egressTest is a pod and the listener for its connections to other hosts.
type egressTest struct {
	*testing.T
	r      *bpf.Redirect
	cookie uint64 // of the pod's network namespace
	pod    bpf.Pod
	port   uint16              // of the listener
	went   chan netip.AddrPort // the destinations of the connections it accepted
	stop   func()
}

func newEgressTest(t *testing.T) *egressTest {
	t.Helper()
	e := &egressTest{T: t, r: open(t, bpftest.Cgroup(t), bpftest.BPFFS(t))}
	require.NoError(t, e.r.Egress())
	e.cookie = namespace(t)
	main, _ := listen(t)
	e.port, e.went, e.stop = accepter(t, e.r, e.cookie)
	require.NoError(t, e.r.SetDestinations([]netip.AddrPort{service4, service6}))
	e.pod = bpf.Pod{UID: [16]byte{1}, Port: main}
	require.NoError(t, e.r.SetPod(bpf.ByCookie(e.cookie), e.pod))
	return e
}

// direct requires that connections and datagrams to other hosts are not redirected.
func (e *egressTest) direct(why string) {
	e.Helper()
	for name, way := range everyWayElsewhere {
		_, err := way.connect(way.to)
		require.ErrorIs(e, err, unix.ENETUNREACH, "%s: %s", name, why)
		for _, connected := range []bool{true, false} {
			require.ErrorIs(e, send(way.to, way.mapped, connected), unix.ENETUNREACH, "%s by UDP: %s", name, why)
		}
	}
}

// redirected requires that connections to other hosts reach the listener, and that datagrams
// are refused.
func (e *egressTest) redirected(why string) {
	e.Helper()
	for name, way := range everyWayElsewhere {
		peer, err := way.connect(way.to)
		require.NoError(e, err, "%s: %s", name, why)
		require.Equal(e, way.to, <-e.went, name)
		require.Equal(e, way.to, netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port()), "%s: the peer it sees", name)
		for _, connected := range []bool{true, false} {
			require.ErrorIs(e, send(way.to, way.mapped, connected), unix.EPERM, "%s by UDP: %s", name, why)
		}
	}
}

// exceptions requires that these connections are never redirected: to the apiserver, of the
// agent, to the pod itself, to other ports and to the listener.
func (e *egressTest) exceptions() {
	e.Helper()
	requireRedirected(e.T, "connections to the apiserver keep their own listener")
	require.Empty(e, e.went)
	for _, way := range everyWayElsewhere {
		_, err := client{mapped: way.mapped, prepare: e.r.MarkSocket}.connect(way.to)
		require.ErrorIs(e, err, unix.ENETUNREACH, "the agent's own")
		_, err = client{mapped: way.mapped, prepare: toDevice}.connect(way.to)
		require.ErrorIs(e, err, unix.EPERM, "bound to a device")
	}
	for _, own := range []string{"198.18.254.7:8443", "[fd00:18::7]:8443", "198.18.254.1:8444", "198.18.254.1:80"} {
		_, err := client{}.connect(netip.MustParseAddrPort(own))
		require.ErrorIs(e, err, unix.ENETUNREACH, own)
	}
	for _, local := range []string{"127.0.0.1:8443", "127.9.9.9:443", "[::1]:8443", "0.0.0.0:443", "[::]:443", "[::ffff:127.0.0.1]:443"} {
		_, err := client{}.connect(netip.MustParseAddrPort(local))
		require.ErrorIs(e, err, unix.ECONNREFUSED, local)
	}
	require.NotErrorIs(e, send(netip.MustParseAddrPort("127.0.0.1:443"), false, false), unix.EPERM)
	require.NotErrorIs(e, send(netip.MustParseAddrPort("198.18.254.1:53"), false, false), unix.EPERM)

	// A connection to the listener itself has no other destination.
	_, err := client{}.connect(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), e.port))
	require.NoError(e, err)
	require.Equal(e, netip.AddrPort{}, <-e.went)
}

// otherPorts replaces the ports.
func (e *egressTest) otherPorts() {
	e.Helper()
	require.NoError(e, e.r.SetEgress(e.pod.UID, []uint16{80, 8443}, nil))
	e.redirected("stays")
	_, err := client{}.connect(plain4)
	require.NoError(e, err)
	require.Equal(e, plain4, <-e.went)
	_, err = client{}.connect(netip.MustParseAddrPort("198.18.254.1:443"))
	require.ErrorIs(e, err, unix.ENETUNREACH, "a port no more")
	has, err := e.r.HasEgress(e.pod.UID, []uint16{80, 8443})
	require.NoError(e, err)
	require.True(e, has)
	has, err = e.r.HasEgress(e.pod.UID, []uint16{80, 443})
	require.NoError(e, err)
	require.False(e, has)
	ports, err := e.r.EgressPorts(e.pod.UID)
	require.NoError(e, err)
	require.Equal(e, []uint16{80, 8443}, ports)
}

// otherPods requires that another pod's ports do not apply to this one, and that a sweep
// removes only those.
func (e *egressTest) otherPods() {
	e.Helper()
	require.NoError(e, e.r.SetEgress([16]byte{2}, []uint16{444}, nil))
	_, err := client{}.connect(other4)
	require.ErrorIs(e, err, unix.ENETUNREACH)

	require.NoError(e, e.r.Sweep(func(uid [16]byte) bool { return uid == [16]byte{1} }))
	ports, err := e.r.EgressPorts([16]byte{2})
	require.NoError(e, err)
	require.Empty(e, ports)
	e.redirected("after a sweep")
}

// withoutAgent stops the listener: connections are refused, or direct if the pod is open.
func (e *egressTest) withoutAgent() {
	e.Helper()
	e.stop()
	_, err := client{}.connect(elsewhere4)
	require.ErrorIs(e, err, unix.ECONNREFUSED, "nothing listens")
	require.ErrorIs(e, send(elsewhere4, false, false), unix.EPERM)
	e.pod.Open = true
	require.NoError(e, e.r.SetPod(bpf.ByCookie(e.cookie), e.pod))
	e.r.Beat()
	e.direct("open, and nothing listens")
}

// TestEgressOfHostNetworkPods distinguishes pods by their cgroups.
func TestEgressOfHostNetworkPods(t *testing.T) {
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
	require.NoError(t, r.SetPod(bpf.ByCgroup(inode(t, filepath.Join(cgroup, "one"))), pod))
	require.NoError(t, r.SetPod(bpf.ByCgroup(inode(t, filepath.Join(cgroup, "two"))), bpf.Pod{UID: [16]byte{2}, Port: main}))
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

// TestOriginsOfConcurrentConnections connects to many destinations at once.
func TestOriginsOfConcurrentConnections(t *testing.T) {
	r := open(t, bpftest.Cgroup(t), bpftest.BPFFS(t))
	cookie := namespace(t)
	netns, err := os.Open("/proc/thread-self/ns/net")
	require.NoError(t, err)
	defer netns.Close()
	port, went, _ := accepter(t, r, cookie)
	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), bpf.Pod{UID: [16]byte{1}, Port: 1, Egress: port}))
	require.NoError(t, r.SetEgress([16]byte{1}, []uint16{8443}, nil))

	const workers, each = 16, 100
	var mu sync.Mutex
	meant := map[netip.AddrPort]int{}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			// The thread exits with the goroutine.
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
	require.Empty(t, meant, "original destinations less those that the listener looked up")
}
