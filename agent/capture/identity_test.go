package capture

import (
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/listener"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
)

// Every process of the node can connect to them.
func TestHostNetworkListenersServeTheirPodAlone(t *testing.T) {
	cfg := ebpfConfig(t)
	var refused atomic.Int64
	cfg.Refused = func(peer netip.Addr, why Refusal) {
		if why == ForeignProcess {
			require.True(t, peer.IsLoopback())
			refused.Add(1)
		}
	}
	w := newWorld(t)
	host := w.pod()
	m := w.agent(cfg)
	pods := filepath.Join(cfg.CgroupRoot, "kubepods")
	own, other := filepath.Join(pods, "pod1"), filepath.Join(pods, "pod2")
	container, nested := filepath.Join(own, "container"), filepath.Join(own, "container/nested")
	for _, dir := range []string{pods, own, other, container} {
		bpftest.MakeCgroup(t, dir)
	}
	join := func(cgroup string) {
		t.Helper()
		require.NoError(t, os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte("0"), 0))
	}
	defer join(cfg.CgroupRoot)
	join(container)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(own, &st))
	p := capturedBy(t, m, Request{UID: uid, NetNS: host.Path, HostNetwork: true, Cgroup: st.Ino}, "mesh")

	for _, loopback := range []netip.Addr{listener.Loopback4, listener.Loopback6} {
		to := netip.AddrPortFrom(loopback, p.known.Port)
		join(container)
		requireAnswer(t, host, client{}, to, "mesh", "")
		for _, cgroup := range []string{other, cfg.CgroupRoot} {
			join(cgroup)
			before := refused.Load()
			who, _, err := client{}.connect(host, to)
			require.Empty(t, who, cgroup)
			if err != nil {
				require.ErrorContains(t, err, "reset by peer")
			}
			require.Eventually(t, func() bool { return refused.Load() == before+1 }, soon, time.Millisecond)
		}
	}
	join(container)
	who, _, err := client{mapped: true}.connect(host, netip.AddrPortFrom(listener.Loopback4, p.known.Port))
	require.NoError(t, err)
	require.Equal(t, "mesh", who, "an IPv6 socket of the pod's")

	bpftest.MakeCgroup(t, nested) // after the pod was captured
	join(nested)
	becomes(t, host, "mesh", service4)
	join(cfg.CgroupRoot)
}
