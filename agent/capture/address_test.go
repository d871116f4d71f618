package capture

import (
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

var byAddress = methods[len(methods)-1]

// TestStrangersAreTurnedAway are peers whose address is no captured pod's.
func TestStrangersAreTurnedAway(t *testing.T) {
	w := newWorld(t)
	pod, strange := w.pod(), w.pod()
	cfg := byAddress.config(t)
	var refused atomic.Value
	cfg.Refused = func(peer netip.Addr) { refused.Store(peer) }
	captured(t, w.agent(cfg), uid, pod, "mesh")
	for i, to := range agents {
		who, _, err := client{}.connect(strange, to)
		require.NoError(t, err)
		require.Empty(t, who)
		v4, v6 := strange.addresses(2)
		require.Equal(t, []netip.Addr{v4, v6}[i], refused.Load())
		who, _, err = client{}.connect(pod, to)
		require.NoError(t, err)
		require.Equal(t, "mesh", who)
	}
}

// TestPodThatIsNotAcceptedFrom must not keep others waiting.
func TestPodThatIsNotAcceptedFrom(t *testing.T) {
	w := newWorld(t)
	greedy, pod := w.pod(), w.pod()
	cfg := byAddress.config(t)
	var refused atomic.Int32
	cfg.Refused = func(netip.Addr) { refused.Add(1) }
	m := w.agent(cfg)
	p, err := m.Capture(request(m, uid, greedy))
	require.NoError(t, err)
	captured(t, m, "00000000-0000-4000-8000-000000000002", pod, "mesh")

	var held []net.Conn
	for range queueLength + 10 {
		require.NoError(t, greedy.do(func() error {
			c, err := net.Dial("tcp", agent4.String())
			held = append(held, c)
			return err
		}))
	}
	defer func() {
		for _, c := range held {
			c.Close()
		}
	}()
	require.Eventually(t, func() bool { return refused.Load() == 10 }, 10*time.Second, time.Millisecond)
	who, _, err := client{}.connect(pod, agent4)
	require.NoError(t, err)
	require.Equal(t, "mesh", who)

	// What waits is closed with the pod's listener.
	require.NoError(t, p.Release())
	for _, c := range held {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	_, err = p.Listeners()[0].Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}

// TestAddressOfTwo is a pod that takes another's address. It must not get its connections.
func TestAddressOfTwo(t *testing.T) {
	w := newWorld(t)
	pod, thief := w.pod(), w.pod()
	m := w.agent(byAddress.config(t))
	captured(t, m, uid, pod, "mesh")
	pod4, _ := pod.addresses(1)
	thief.address("lo", pod4.String()+"/32")
	r := request(m, "00000000-0000-4000-8000-000000000002", thief)
	_, err := m.Capture(r)
	require.ErrorContains(t, err, pod4.String())
	require.ErrorContains(t, err, uid)
	for _, to := range agents {
		who, _, err := client{}.connect(pod, to)
		require.NoError(t, err)
		require.Equal(t, "mesh", who)
	}

	// A sandbox that lost it, though it is not released yet, does not stand in the way.
	eth0, err := pod.link.LinkByName("eth0")
	require.NoError(t, err)
	lost, err := netlink.ParseAddr(pod4.String() + "/24")
	require.NoError(t, err)
	require.NoError(t, pod.link.AddrDel(eth0, lost))
	_, err = m.Capture(r)
	require.NoError(t, err)
}

// TestPodWithoutAddress is one whose network is not there yet.
func TestPodWithoutAddress(t *testing.T) {
	w := newWorld(t)
	m := w.agent(byAddress.config(t))
	pod := newNS(t)
	_, err := m.Capture(request(m, uid, pod))
	require.ErrorContains(t, err, "no address yet")
}
