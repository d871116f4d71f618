package capture

import (
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

func TestConnectionsOfUnknownClientsAreClosed(t *testing.T) {
	w := newWorld(t)
	pod, strange := w.pod(), w.pod()
	cfg := byAddress.config(t)
	var refused atomic.Value
	cfg.Refused = func(peer netip.Addr, why Refusal) {
		assert.Equal(t, Stranger, why)
		refused.Store(peer)
	}
	captured(t, w.agent(cfg), uid, pod, "mesh")
	for i, to := range agents {
		who, _, err := client{}.connect(strange, to)
		require.NoError(t, err)
		require.Empty(t, who)
		v4, v6 := strange.addresses(2)
		require.Equal(t, []netip.Addr{v4, v6}[i], refused.Load())
		requireAnswer(t, pod, client{}, to, "mesh", "")
	}
}

func TestFullQueueDelaysNoOtherPod(t *testing.T) {
	w := newWorld(t)
	greedy, pod := w.pod(), w.pod()
	cfg := byAddress.config(t)
	var refused atomic.Int32
	cfg.Refused = func(_ netip.Addr, why Refusal) {
		assert.Equal(t, QueueFull, why)
		refused.Add(1)
	}
	m := w.agent(cfg)
	p, err := m.Capture(request(m, uid, greedy))
	require.NoError(t, err)
	captured(t, m, "00000000-0000-4000-8000-000000000002", pod, "mesh")

	var held []net.Conn
	for range 128 + 10 {
		require.NoError(t, greedy.Do(func() error {
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
	require.Eventually(t, func() bool { return refused.Load() == 10 }, soon, time.Millisecond)
	requireAnswer(t, pod, client{}, agent4, "mesh", "")

	// What waits is closed with the pod's listener.
	require.NoError(t, p.Release())
	for _, c := range held {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(soon)))
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	_, err = p.Listeners()[0].Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestPodWithAnothersAddressGetsNoConnections(t *testing.T) {
	w := newWorld(t)
	pod, thief := w.pod(), w.pod()
	m := w.agent(byAddress.config(t))
	captured(t, m, uid, pod, "mesh")
	pod4, _ := pod.addresses(1)
	thief.Up("lo", pod4.String()+"/32")
	r := request(m, "00000000-0000-4000-8000-000000000002", thief)
	_, err := m.Capture(r)
	require.ErrorContains(t, err, pod4.String())
	require.ErrorContains(t, err, uid)
	for _, to := range agents {
		requireAnswer(t, pod, client{}, to, "mesh", "")
	}

	// A sandbox that lost it, though it is not released yet, does not stand in the way.
	eth0, err := pod.Link.LinkByName("eth0")
	require.NoError(t, err)
	lost, err := netlink.ParseAddr(pod4.String() + "/24")
	require.NoError(t, err)
	require.NoError(t, pod.Link.AddrDel(eth0, lost))
	_, err = m.Capture(r)
	require.NoError(t, err)
}

func TestGivenAddressWinsOverOneThatWasRead(t *testing.T) {
	w := newWorld(t)
	pod, thief := w.pod(), w.pod()
	m := w.agent(byAddress.config(t))
	pod4, pod6 := pod.addresses(1)
	thief4, _ := thief.addresses(2)
	thief.Up("lo", pod4.String()+"/32")
	squatter := captured(t, m, "00000000-0000-4000-8000-000000000002", thief, "thief")
	require.Equal(t, pod4, squatter.Addresses()[0])

	r := request(m, uid, pod)
	r.Addresses = []netip.Addr{pod4, pod6}
	p, err := m.Capture(r)
	require.NoError(t, err)
	require.Equal(t, r.Addresses, p.Addresses())
	answer(t, "mesh", p.Listeners()...)
	for _, to := range agents {
		requireAnswer(t, pod, client{}, to, "mesh", "")
	}
	require.NoError(t, squatter.Release())
	who, _, err := client{}.connect(pod, agent4)
	require.NoError(t, err)
	require.Equal(t, "mesh", who, "it was no longer the squatter's to let go")

	// What it has beside what is known, it is not known by.
	r = request(m, "00000000-0000-4000-8000-000000000002", thief)
	r.Addresses = []netip.Addr{thief4}
	p, err = m.Capture(r)
	require.NoError(t, err)
	require.Equal(t, []netip.Addr{thief4}, p.Addresses())
	require.ErrorContains(t, p.SetAddresses([]netip.Addr{pod4}), uid)

	// A sandbox made anew has others.
	anew := netip.MustParseAddr("198.18.2.77")
	thief.Up("eth0", anew.String()+"/24")
	answer(t, "anew", p.Listeners()...)
	require.NoError(t, p.SetAddresses([]netip.Addr{anew}))
	requireAnswer(t, thief, client{bind: anew}, agent4, "anew", "")
	who, _, err = client{bind: thief4}.connect(thief, agent4)
	require.NoError(t, err)
	require.Empty(t, who)
}

func TestPodWithoutAddressIsNotCaptured(t *testing.T) {
	w := newWorld(t)
	m := w.agent(byAddress.config(t))
	pod := newNS(t)
	_, err := m.Capture(request(m, uid, pod))
	require.ErrorContains(t, err, "no address yet")
}

func TestFloodOfUnknownClientsKeepsNothingOpen(t *testing.T) {
	w := newWorld(t)
	pod, strange := w.pod(), w.pod()
	cfg := byAddress.config(t)
	m := w.agent(cfg)
	captured(t, m, uid, pod, "mesh")
	const flood = 500
	var open []net.Conn
	require.NoError(t, strange.Do(func() error {
		for range flood {
			c, err := net.Dial("tcp", agent4.String())
			if err != nil {
				return err
			}
			open = append(open, c)
		}
		return nil
	}))
	requireAnswer(t, pod, client{}, agent4, "mesh", "")
	for _, c := range open {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(soon)))
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		require.NoError(t, c.Close())
	}
}
