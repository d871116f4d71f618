package agent

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// inNamespace makes a network namespace with a way out that leads nowhere; do runs in it.
func inNamespace(t *testing.T) (path string, do func(f func() error) error) {
	t.Helper()
	calls, results := make(chan func() error), make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread goes with the goroutine
		for f := range calls {
			results <- f()
		}
	}()
	t.Cleanup(func() { close(calls) })
	do = func(f func() error) error {
		calls <- f
		return <-results
	}
	var file *os.File
	require.NoError(t, do(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		everywhere := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth1"}
		if err := netlink.LinkAdd(link); err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(198, 18, 0, 9).To4(), Mask: net.CIDRMask(32, 32)}}); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		peer, err := netlink.LinkByName("eth1")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(peer); err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Index, Dst: everywhere}); err != nil {
			return err
		}
		file, err = os.Open("/proc/thread-self/ns/net")
		return err
	}))
	t.Cleanup(func() { file.Close() })
	return fmt.Sprintf("/proc/self/fd/%d", file.Fd()), do
}

// The rules of a pod decide about its other connections as soon as the policy has
// them, and its connections are its own again once it has none.
func TestOtherConnectionsAreRedirectedWhileThePolicySaysSo(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	if _, err := exec.LookPath("iptables-nft"); err != nil {
		t.Skip("needs iptables-nft")
	}
	const uid = "3a1f0c52-6a53-4f0e-8e0a-0f4b1f9f6d11"
	path, do := inNamespace(t)
	r := start(t, 0)
	method, err := capture.Open(capture.Config{Mode: capture.IPTables, IPTables: "nft", PinDir: filepath.Join(t.TempDir(), "none"), Logger: r.logger})
	require.NoError(t, err)
	defer method.Close()
	cluster := somewhere(t)
	require.NoError(t, r.SetCluster(cluster))
	destinations, err := parseAddresses(cluster.GetServiceAddresses())
	require.NoError(t, err)
	require.NoError(t, method.SetDestinations(destinations, nil))
	captured, err := method.Capture(capture.Request{UID: uid, NetNS: path})
	require.NoError(t, err)
	require.NoError(t, r.do(t.Context(), func() error {
		r.members[uid] = &member{
			pod: pods.Pod{UID: uid, Namespace: "ns", Name: "a"}, since: time.Now(), told: time.Now(), captured: captured,
			proxied: r.proxy.Pod(proxy.PodInfo{UID: uid, Namespace: "ns", Name: "a"}, captured.DialContext),
		}
		return nil
	}))
	// Nobody is at that address: who connects is connected to the agent.
	redirected := func() bool {
		return do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Usec: 300_000}); err != nil {
				return err
			}
			return unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{198, 18, 7, 7}, Port: 8080})
		}) == nil
	}
	assert.False(t, redirected())

	with := func(version string, ports ...uint32) *meshv1.PodPolicy {
		p := &meshv1.PodPolicy{Uid: uid, Namespace: "ns", Name: "a", Version: version}
		if len(ports) > 0 {
			p.Traffic = &meshv1.Traffic{Egress: &meshv1.Egress{Ports: ports}}
		}
		return p
	}
	setPolicy(t, r, with("1", 8080, 1<<20))
	assert.True(t, redirected())
	bad := with("bad")
	bad.Traffic = &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Rules: []*meshv1.LimitRule{{}}}}}
	listeners, err := captured.SetEgress([]uint16{8080})
	require.NoError(t, err)
	setPolicy(t, r, bad)
	require.NotEmpty(t, r.TrafficProblem(uid))
	still, err := captured.SetEgress([]uint16{8080})
	require.NoError(t, err)
	assert.Equal(t, listeners, still, "what stays in force was redirected throughout")
	assert.True(t, redirected())
	setPolicy(t, r, with("2", 8081))
	assert.False(t, redirected(), "another port")
	setPolicy(t, r, with("3", 8080))
	assert.True(t, redirected())
	setPolicy(t, r, with("4"))
	assert.False(t, redirected())
	setPolicy(t, r, with("5", 8080))
	require.NoError(t, r.RemovePolicy(uid))
	assert.True(t, redirected(), "the rules last")
	saved, err := r.store.Policy(uid)
	require.NoError(t, err)
	assert.Equal(t, noPolicy, saved.GetRefuse())
	assert.Equal(t, []uint32{8080}, saved.GetTraffic().GetEgress().GetPorts(), "in the next agent too")

	// An agent that hands over changes nothing of it, until it serves again.
	setPolicy(t, r, with("6", 8080))
	require.NoError(t, r.do(t.Context(), func() error { r.enter(handing); return nil }))
	setPolicy(t, r, with("7"))
	assert.True(t, redirected())
	require.NoError(t, holder{r.mesh}.Resume(t.Context()))
	assert.False(t, redirected())

	// What cannot be, the manager is told. Listeners that come later are served.
	setPolicy(t, r, with("served", 8080))
	require.NoError(t, captured.Release())
	setPolicy(t, r, with("ended"))
	r.in(t, func() { assert.False(t, r.members[uid].egress) })
	setPolicy(t, r, with("8", 8080))
	r.soon(t, "the report", func() bool { return r.reported(uid).GetEgressMessage() != "" })
	assert.Contains(t, r.reported(uid).GetEgressMessage(), "captured no longer")
}
