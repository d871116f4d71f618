package bpf_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
)

// steered returns the steering of port 9443 in a network namespace of the calling thread, and
// how to connect to it. No application listens there, so a connection that is not steered is
// refused.
func steered(t *testing.T, dir string) (i *bpf.Inbound, s *bpf.Steering, connect func(from string) error) {
	t.Helper()
	namespace(t)
	lo, err := netlink.LinkByName("lo")
	require.NoError(t, err)
	for _, a := range []string{"198.51.100.1/32", "198.51.100.2/32"} {
		address, err := netlink.ParseAddr(a)
		require.NoError(t, err)
		require.NoError(t, netlink.AddrAdd(lo, address))
	}
	i, err = bpf.OpenInbound(dir)
	require.NoError(t, err)
	t.Cleanup(func() { i.Close() })
	netns, err := os.Open("/proc/thread-self/ns/net")
	require.NoError(t, err)
	t.Cleanup(func() { netns.Close() })
	s, err = i.Steer([16]byte{1}, netns)
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })

	var config net.ListenConfig
	config.SetMultipathTCP(false)
	l, err := config.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	require.NoError(t, s.Set(9443, bpf.IPv4, l.(*net.TCPListener)))
	return i, s, func(from string) error {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := dialer.DialContext(t.Context(), "tcp4", "198.51.100.1:9443")
		if err == nil {
			c.Close()
		}
		return err
	}
}

func TestInboundSharesTheHeartbeatOfRedirect(t *testing.T) {
	cgroup, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	r := open(t, cgroup, dir)
	i, _, connect := steered(t, dir)
	require.ErrorIs(t, connect("198.51.100.2"), unix.ECONNREFUSED, "no beat yet")
	fromOutside := func() error { return connect("198.51.100.2") }
	requireWhileAlive(t, r.Beat, func() error {
		require.ErrorIs(t, connect("198.51.100.1"), unix.ECONNREFUSED, "from the address itself")
		require.ErrorIs(t, connect("127.0.0.1"), unix.ECONNREFUSED, "from loopback")
		return fromOutside()
	}, "alive")
	// Another goroutine would be in another network namespace, so this one waits.
	for lapsed := time.Now().Add(30 * time.Second); fromOutside() == nil; time.Sleep(10 * time.Millisecond) {
		require.True(t, time.Now().Before(lapsed), "the heartbeat is old")
	}
	require.ErrorIs(t, fromOutside(), unix.ECONNREFUSED)
	requireWhileAlive(t, i.Beat, fromOutside, "the beat of the other")
}

func TestSteeringIsRemoved(t *testing.T) {
	dir := filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	i, s, connect := steered(t, dir)
	requireWhileAlive(t, i.Beat, func() error { return connect("198.51.100.2") }, "steered")
	require.NoError(t, s.Check())
	ports, err := s.Ports(bpf.IPv4)
	require.NoError(t, err)
	require.Equal(t, []uint16{9443}, ports)

	require.NoError(t, s.Delete(9443, bpf.IPv4))
	require.NoError(t, s.Delete(9443, bpf.IPv4), "twice")
	require.ErrorIs(t, connect("198.51.100.2"), unix.ECONNREFUSED)

	require.NoError(t, s.Remove())
	require.Error(t, s.Check())
	left, err := filepath.Glob(filepath.Join(dir, "inbound_*", "*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestInboundNeedsABPFFS(t *testing.T) {
	_, err := bpf.OpenInbound(t.TempDir())
	require.ErrorIs(t, err, bpf.ErrUnsupported)
	require.ErrorContains(t, err, "is not on a bpffs")
}
