package inbound

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
)

func pins(t testing.TB) string { return filepath.Join(bpftest.BPFFS(t), "ctrlmesh") }

func at(a string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(a), port)
}

func TestConnectionsFromOutsideReachTheAgent(t *testing.T) {
	for _, application := range []struct{ network, at string }{
		{"tcp", ":9443"}, {"tcp4", "0.0.0.0:9443"}, {"tcp6", "[::]:9443"}, {"tcp", "198.18.7.1:9443"},
	} {
		t.Run(application.network+" "+application.at, func(t *testing.T) {
			pod, outside := newPod(t)
			n := open(t, pins(t))
			pod.listen(application.network, application.at)
			capture(t, n, pod, "agent")
			for _, a := range []netip.Addr{pod4, pod6} {
				if to := netip.AddrPortFrom(a, port); pod.canReach(to) {
					outside.require("agent", to)
				} else {
					outside.requireRefused(to) // the application does not listen at it
				}
			}
		})
	}
}

// canReach reports whether the application listens at an address of the pod.
func (n *ns) canReach(to netip.AddrPort) bool {
	who, _, err := n.connect(to)
	return err == nil && who == "application"
}

func TestThePodReachesItsOwnApplication(t *testing.T) {
	pod, outside := newPod(t)
	n := open(t, pins(t))
	pod.listen("tcp", ":9443")
	pod.listen("tcp", ":8080")
	capture(t, n, pod, "agent")
	outside.requireSteered("agent")
	for _, to := range []string{"127.0.0.1", "::1", pod4.String(), pod6.String()} {
		pod.require("application", at(to, port))
	}
	for _, to := range []netip.Addr{pod4, pod6} {
		outside.require("application", netip.AddrPortFrom(to, 8080)) // another port
	}
}

func TestDeadApplicationIsNotHidden(t *testing.T) {
	pod, outside := newPod(t)
	n := open(t, pins(t))
	capture(t, n, pod, "agent")
	outside.requireRefused(netip.AddrPortFrom(pod4, port))

	stop := pod.listen("tcp", ":9443")
	outside.require("application", netip.AddrPortFrom(pod4, port))
	require.NoError(t, n.Check())
	outside.requireSteered("agent")

	stop()
	require.NoError(t, n.Check())
	for _, a := range []netip.Addr{pod4, pod6} {
		outside.requireRefused(netip.AddrPortFrom(a, port))
	}

	pod.listen("tcp4", "0.0.0.0:9443")
	require.NoError(t, n.Check())
	outside.require("agent", netip.AddrPortFrom(pod4, port))
	outside.requireRefused(netip.AddrPortFrom(pod6, port))
}

func TestApplicationAnswersWithoutTheAgent(t *testing.T) {
	t.Run("listener closed", func(t *testing.T) {
		pod, outside := newPod(t)
		n := open(t, pins(t))
		pod.listen("tcp", ":9443")
		p := capture(t, n, pod, "agent")
		outside.requireSteered("agent")
		for _, l := range p.Listeners() {
			require.NoError(t, l.Close())
		}
		outside.requireSteered("application")
	})
	t.Run("stale heartbeat", func(t *testing.T) {
		pod, outside := newPod(t)
		n := open(t, pins(t))
		pod.listen("tcp", ":9443")
		capture(t, n, pod, "agent")
		outside.requireSteered("agent")
		signs.stop(true)
		require.Eventually(t, func() bool {
			who, _, err := outside.connect(netip.AddrPortFrom(pod4, port))
			require.NoError(t, err)
			return who == "application"
		}, soon, 10*time.Millisecond)
		signs.stop(false)
		require.Eventually(t, func() bool {
			who, _, err := outside.connect(netip.AddrPortFrom(pod6, port))
			require.NoError(t, err)
			return who == "agent"
		}, soon, 10*time.Millisecond)
	})
}

// startConnecting connects until it is stopped, and counts who answered.
func startConnecting(t *testing.T, from *ns, to ...netip.AddrPort) (total *atomic.Int64, stop func() map[string]int) {
	t.Helper()
	total = &atomic.Int64{}
	counts, quit, done := map[string]int{}, make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-quit:
				return
			default:
			}
			who, _, err := from.connect(to[i%len(to)])
			if err != nil {
				who = err.Error()
			}
			counts[who]++
			total.Add(1)
		}
	}()
	return total, func() map[string]int {
		close(quit)
		<-done
		t.Log(counts)
		return counts
	}
}

func TestTakeoverRefusesNoConnection(t *testing.T) {
	pod, outside := newPod(t)
	dir := pins(t)
	pod.listen("tcp", ":9443")
	both := []netip.AddrPort{netip.AddrPortFrom(pod4, port), netip.AddrPortFrom(pod6, port)}
	first := open(t, dir)
	p := capture(t, first, pod, "first")
	total, stop := startConnecting(t, outside, both...)
	more := func() {
		before := total.Load()
		require.Eventually(t, func() bool { return total.Load() > before+50 }, soon, time.Millisecond)
	}
	more()
	for _, name := range []string{"second", "third"} {
		files, err := p.Files()
		require.NoError(t, err)
		next := capture(t, open(t, dir), pod, name, files...)
		more()
		require.NoError(t, p.Abandon())
		require.NoError(t, p.Release())
		require.Equal(t, 1, pod.attached())
		more()
		p = next
	}
	counts := stop()
	require.Len(t, counts, 3, "a connection failed, or reached the application")
	require.NotZero(t, counts["third"])
	require.Zero(t, counts["application"])
	outside.requireSteered("third")
}

func TestNextAgentTakesOverWithoutFiles(t *testing.T) {
	t.Run("overlapping", func(t *testing.T) {
		pod, outside := newPod(t)
		dir := pins(t)
		pod.listen("tcp", ":9443")
		first, second := open(t, dir), open(t, dir)
		p := capture(t, first, pod, "first")
		outside.requireSteered("first")
		capture(t, second, pod, "second")
		outside.requireSteered("second")
		require.NoError(t, first.Check())
		outside.requireSteered("second")
		require.NoError(t, p.Release())
		outside.requireSteered("second")
		require.Equal(t, 1, pod.attached())
	})
	t.Run("after", func(t *testing.T) {
		pod, outside := newPod(t)
		dir := pins(t)
		pod.listen("tcp", ":9443")
		require.NoError(t, capture(t, open(t, dir), pod, "first").Abandon())
		outside.requireSteered("application")
		require.Equal(t, 1, pod.attached())
		capture(t, open(t, dir), pod, "second")
		outside.requireSteered("second")
		require.Equal(t, 1, pod.attached())
	})
}

func TestReleaseLeavesNothing(t *testing.T) {
	pod, outside := newPod(t)
	dir := pins(t)
	pod.listen("tcp", ":9443")
	released := func(t *testing.T) {
		t.Helper()
		outside.requireSteered("application")
		require.Zero(t, pod.attached())
		left, err := filepath.Glob(filepath.Join(dir, "inbound_v*", "*"))
		require.NoError(t, err)
		require.Empty(t, left)
	}
	n := open(t, dir)
	p := capture(t, n, pod, "agent")
	require.NoError(t, p.Release())
	require.NoError(t, p.Release(), "twice")
	require.ErrorIs(t, p.SetPorts(nil), os.ErrClosed)
	released(t)

	capture(t, n, pod, "agent")
	outside.requireSteered("agent")
	require.NoError(t, n.Sweep(func(string) bool { return true }))
	outside.requireSteered("agent")
	require.NoError(t, n.Sweep(func(string) bool { return false }))
	released(t)

	require.NoError(t, capture(t, n, pod, "agent").Abandon())
	require.Equal(t, 1, pod.attached(), "as after a crash")
	require.NoError(t, open(t, dir).Sweep(func(string) bool { return false }))
	released(t)

	require.NoError(t, capture(t, n, pod, "agent").Abandon())
	require.NoError(t, bpf.Remove(dir))
	require.NoFileExists(t, dir)
	require.Zero(t, pod.attached())
}

func TestPortsChange(t *testing.T) {
	pod, outside := newPod(t)
	n := open(t, pins(t))
	pod.listen("tcp", ":9443")
	pod.listen("tcp", ":9444")
	p := capture(t, n, pod, "agent")
	other := netip.AddrPortFrom(pod4, 9444)
	outside.require("application", other)
	require.NoError(t, p.SetPorts([]uint16{9444}))
	outside.require("agent", other)
	outside.requireSteered("application")
	require.NoError(t, p.SetPorts(nil))
	outside.require("application", other)
	require.ErrorContains(t, p.SetPorts([]uint16{0}), "invalid port")

	// A process of the pod that dials the listener itself is not served.
	own := p.Listeners()[0].Addr().String()
	who, _, _ := pod.connect(netip.MustParseAddrPort(own))
	require.Empty(t, who)
}

func TestRemovedSteeringIsRestored(t *testing.T) {
	pod, outside := newPod(t)
	dir := pins(t)
	n := open(t, dir)
	pod.listen("tcp", ":9443")
	capture(t, n, pod, "agent")
	require.NoError(t, bpf.Remove(dir))
	outside.requireSteered("application")
	require.NoError(t, n.Check())
	outside.requireSteered("agent")
	require.Equal(t, 1, pod.attached())
}

func TestNewNetworkNamespaceIsCaptured(t *testing.T) {
	pod, outside := newPod(t)
	n := open(t, pins(t))
	pod.listen("tcp", ":9443")
	p := capture(t, n, pod, "before")
	same, err := n.Capture(Request{UID: uid, NetNS: pod.Path, Ports: []uint16{port}})
	require.NoError(t, err)
	require.Same(t, p, same)

	next, nextOutside := newPod(t)
	next.listen("tcp", ":9443")
	capture(t, n, next, "after")
	nextOutside.requireSteered("after")
	outside.requireSteered("application")
	require.Zero(t, pod.attached())
}

func TestUnsuitablePodsAreRejected(t *testing.T) {
	pod, _ := newPod(t)
	n := open(t, pins(t))
	_, err := n.Capture(Request{UID: uid, NetNS: netns.Own, Ports: []uint16{port}})
	require.ErrorIs(t, err, netns.ErrHostNetwork)
	_, err = n.Capture(Request{UID: "x", NetNS: pod.Path})
	require.ErrorContains(t, err, "invalid uid")
	_, err = n.Capture(Request{UID: uid, NetNS: "/nowhere"})
	require.ErrorIs(t, err, unix.ENOENT)
	require.Zero(t, pod.attached())
	_, err = Open(t.TempDir(), slog.Default())
	require.ErrorIs(t, err, bpf.ErrUnsupported)
}

func TestUpgradeFromAnotherLayout(t *testing.T) {
	pod, outside := newPod(t)
	dir := pins(t)
	pod.listen("tcp", ":9443")
	old := open(t, dir)
	p := capture(t, old, pod, "old")
	require.NoError(t, os.Rename(filepath.Join(dir, "inbound_v1"), filepath.Join(dir, "inbound_v0")))
	outside.requireSteered("old")

	files, err := p.Files()
	require.NoError(t, err)
	next := capture(t, open(t, dir), pod, "next", files...)
	require.NoError(t, p.Abandon())
	outside.requireSteered("next")
	require.Equal(t, 1, pod.attached())
	require.NoError(t, next.Release())
	outside.requireSteered("application")
	require.Zero(t, pod.attached())
}
