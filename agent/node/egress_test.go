package node

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/program/programtest"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// inNamespace makes a network namespace with a way out that leads nowhere; do runs in it.
func inNamespace(t *testing.T) (path string, do func(f func() error) error) {
	t.Helper()
	calls, results := make(chan func() error), make(chan error)
	serve := func() {
		runtime.LockOSThread() // and never unlock: the thread goes with the goroutine
		for f := range calls {
			results <- f()
		}
	}
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			serve()
			return
		}
		defer runtime.UnlockOSThread()
		done := make(chan struct{}) // on another thread: /proc/self shows this one's namespace
		go func() { defer close(done); serve() }()
		<-done
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
func TestEgressRedirectionFollowsPolicy(t *testing.T) {
	needs.Root(t, "makes network namespaces")
	needs.Program(t, "iptables-nft")
	const uid = "3a1f0c52-6a53-4f0e-8e0a-0f4b1f9f6d11"
	path, do := inNamespace(t)
	r := start(t, 0)
	programtest.Link(t)
	backend, err := capture.Open(capture.Config{Mode: capture.IPTables, PinDir: filepath.Join(t.TempDir(), "none"), Logger: r.Logger})
	require.NoError(t, err)
	defer backend.Close()
	cluster := somewhere(t)
	require.NoError(t, r.SetCluster(cluster))
	destinations, err := parseAddresses(cluster.GetServiceAddresses())
	require.NoError(t, err)
	require.NoError(t, backend.SetDestinations(destinations, nil))
	captured, err := backend.Capture(capture.Request{UID: uid, NetNS: path})
	require.NoError(t, err)
	require.NoError(t, r.do(t.Context(), func() error {
		p := newPod(pods.Pod{UID: uid, Namespace: "ns", Name: "a"}, lifecycle.Announced)
		p.announced, p.redirection.captured = time.Now(), captured
		p.redirection.proxied = r.Proxy.Pod(proxy.PodInfo{UID: uid, Namespace: "ns", Name: "a"}, captured.DialContext)
		p.state, _ = p.state.Next(lifecycle.Capture)
		r.pods[uid] = p
		return nil
	}))
	// Nobody is at that address: who connects is connected to the agent.
	connects := func(within time.Duration) bool {
		return do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			timeout := unix.NsecToTimeval(int64(within))
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout); err != nil {
				return err
			}
			return unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{198, 18, 7, 7}, Port: 8080})
		}) == nil
	}
	redirected := func() bool { return connects(soon) }
	direct := func() bool { return !connects(300 * time.Millisecond) }
	assert.True(t, direct())

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
	applied, err := r.SetPolicy(bad)
	require.NoError(t, err)
	require.NotEmpty(t, applied.TrafficProblem)
	still, err := captured.SetEgress([]uint16{8080})
	require.NoError(t, err)
	assert.Equal(t, listeners, still, "what stays in force was redirected throughout")
	assert.True(t, redirected())
	setPolicy(t, r, with("2", 8081))
	assert.True(t, direct(), "another port")
	setPolicy(t, r, with("3", 8080))
	assert.True(t, redirected())
	setPolicy(t, r, with("4"))
	assert.True(t, direct())
	setPolicy(t, r, with("5", 8080))
	_, err = r.RemovePolicy(uid)
	require.NoError(t, err)
	assert.True(t, redirected(), "the rules last")
	saved, err := r.Store.Policy(uid)
	require.NoError(t, err)
	assert.Equal(t, refusedUnassigned, saved.GetRefuse())
	assert.Equal(t, []uint32{8080}, saved.GetTraffic().GetEgress().GetPorts(), "in the next agent too")

	// An agent that hands over changes nothing of it, until it serves again.
	setPolicy(t, r, with("6", 8080))
	require.NoError(t, r.do(t.Context(), func() error { r.enter(handing); return nil }))
	setPolicy(t, r, with("7"))
	assert.True(t, redirected())
	require.NoError(t, r.Incumbent().Resume(t.Context()))
	assert.True(t, direct())

	// What cannot be redirected is reported to the manager. Listeners that come later are served.
	setPolicy(t, r, with("served", 8080))
	require.NoError(t, captured.Release())
	setPolicy(t, r, with("ended"))
	r.in(t, func() { assert.False(t, r.pods[uid].redirection.egressServed) })
	setPolicy(t, r, with("8", 8080))
	r.soon(t, "the report", func() bool { return r.reported(uid).GetEgressMessage() != "" })
	assert.Contains(t, r.reported(uid).GetEgressMessage(), "does not capture it any more")
}

func TestEgressPortsIncludeThoseOfTheLastRules(t *testing.T) {
	rules := func(ports ...uint32) *meshv1.Traffic { return &meshv1.Traffic{Egress: &meshv1.Egress{Ports: ports}} }
	require.Empty(t, portsOf(nil, &meshv1.Traffic{}))
	require.Equal(t, []uint16{443, 80}, portsOf(rules(443, 80), rules(443, 80)), "in one order, which a kernel's entry is compared by")
	require.Equal(t, []uint16{8080, 443}, portsOf(rules(8080, 0, 65536), rules(443, 8080)))
	require.Equal(t, []uint16{443}, portsOf(nil, rules(443)))
}

const restoredPod = "3a1f0c52-6a53-4f0e-8e0a-0f4b1f9f6d11"

// askFrom connects to another host from a network namespace. It returns the answer.
func askFrom(do func(func() error) error) (said string, err error) {
	err = do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		timeout := &unix.Timeval{Sec: int64(soon / time.Second)}
		_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, timeout)
		_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, timeout)
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{198, 18, 7, 7}, Port: 8080}); err != nil {
			return err
		}
		if _, err := unix.Write(fd, []byte("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")); err != nil {
			return err
		}
		for b := make([]byte, 4096); ; {
			n, err := unix.Read(fd, b)
			if n <= 0 {
				return err
			}
			said += string(b[:n])
		}
	})
	return said, err
}

// startCapturing starts an agent that captures by iptables a pod whose network namespace is
// at path. Its store is in dir.
func startCapturing(t *testing.T, path, dir string) (*running, capture.Backend) {
	t.Helper()
	r := start(t, 0)
	programtest.Link(t)
	backend, err := capture.Open(capture.Config{Mode: capture.IPTables, PinDir: filepath.Join(t.TempDir(), "none"), Logger: r.Logger})
	require.NoError(t, err)
	t.Cleanup(func() { backend.Close() })
	cgroup, process := filepath.Join(r.cgroups, "kubepods/pod"+restoredPod), filepath.Join(r.proc, "7")
	require.NoError(t, os.MkdirAll(cgroup, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte("7\n"), 0o600))
	require.NoError(t, os.MkdirAll(filepath.Join(process, "ns"), 0o755))
	require.NoError(t, os.Symlink(path, filepath.Join(process, "ns/net")))
	require.NoError(t, os.WriteFile(filepath.Join(process, "cgroup"), []byte("0::/kubepods/pod"+restoredPod+"\n"), 0o600))
	require.NoError(t, os.Symlink("/proc/self/stat", filepath.Join(process, "stat")))
	store, err := state.Open(dir)
	require.NoError(t, err)
	require.NoError(t, r.do(t.Context(), func() error { r.Capture, r.Store = backend, store; return nil }))
	return r, backend
}

// restoreCaptured restores what an earlier agent left, and captures the pod.
func (r *running) restoreCaptured(t *testing.T) {
	t.Helper()
	require.NoError(t, r.do(t.Context(), func() error {
		r.presence.restore(r.destinations, nil, nil)
		p := r.pods[restoredPod]
		if p.announced = time.Now(); p.redirection.captured == nil {
			return fmt.Errorf("not captured: %s %s", p.problem, r.log)
		}
		return nil
	}))
}

// What an agent that died had redirected goes nowhere else before its rules are known again.
func TestEgressStaysRedirectedUntilRulesAreKnown(t *testing.T) {
	needs.Root(t, "makes network namespaces")
	needs.Program(t, "iptables-nft")
	const uid = restoredPod
	egress := &meshv1.Egress{Ports: []uint32{8080}}
	good := &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "good", Intercepts: []*meshv1.InterceptRule{{Name: "none", Deny: true, Http: []*meshv1.HttpMatch{{}}}}}}, Egress: egress}
	bad := &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "bad", Rules: []*meshv1.LimitRule{{}}}}, Egress: egress}
	policyOf := func(version string, traffic *meshv1.Traffic) *meshv1.PodPolicy {
		return &meshv1.PodPolicy{Uid: uid, Namespace: "ns", Name: "a", Version: version, Serial: 3, Traffic: traffic}
	}
	deleted := func(r *running) {
		r.pods[uid] = newPod(pods.Pod{}, lifecycle.Deleted)
		r.pods[uid].announced = time.Now() // else the loop removes it, because the API does not list it
	}
	lost := &meshv1.PodPolicy{Uid: uid, Version: "2-lost", Serial: 2, Refuse: "it was deleted"}
	file := uid + ".policy.pb"
	for name, tc := range map[string]struct {
		saved func(t *testing.T, r *running, dir string)
		says  string // what a client gets; "": it is refused, or waits
		sent  []*meshv1.PodPolicy
	}{
		"rules that cannot be": {func(t *testing.T, r *running, _ string) {
			require.NoError(t, r.Store.SavePolicy(state.Saved{PodPolicy: policyOf("bad", bad), Since: time.Now()}))
		}, "could not be applied", nil},
		"rules that cannot be, of a pod that is gone": {func(t *testing.T, r *running, _ string) {
			require.NoError(t, r.Store.SavePolicy(state.Saved{PodPolicy: policyOf("bad", bad), Since: time.Now()}))
			require.NoError(t, r.do(t.Context(), func() error { deleted(r); return nil }))
		}, "could not be applied", nil},
		"rules that cannot be, after those that are saved": {func(*testing.T, *running, string) {}, "CircuitBreaker ns/good",
			[]*meshv1.PodPolicy{policyOf("bad", bad)}},
		"others that cannot be either": {func(*testing.T, *running, string) {}, "CircuitBreaker ns/good",
			[]*meshv1.PodPolicy{policyOf("bad", bad), policyOf("worse", &meshv1.Traffic{Breakers: bad.Breakers})}},
		"no file": {func(t *testing.T, _ *running, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, file))) }, "", nil},
		"no file, of a pod that the manager has lost": {func(t *testing.T, _ *running, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, file))) }, "",
			[]*meshv1.PodPolicy{lost}},
		"no file, of a pod that was lost and has rules that cannot be": {func(t *testing.T, _ *running, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, file))) },
			"could not be applied", []*meshv1.PodPolicy{lost, policyOf("3-bad", bad)}},
		"no file, of a pod that is gone": {func(t *testing.T, r *running, dir string) {
			require.NoError(t, os.Remove(filepath.Join(dir, file)))
			require.NoError(t, r.do(t.Context(), func() error { deleted(r); return nil }))
		}, "", nil},
		"a file that ends early": {func(t *testing.T, _ *running, dir string) {
			info, err := os.Stat(filepath.Join(dir, file))
			require.NoError(t, err)
			// To its end, it is the policy of a pod without rules.
			require.NoError(t, os.Truncate(filepath.Join(dir, file), info.Size()-int64(proto.Size(&meshv1.PodPolicy{Traffic: good}))))
		}, "", nil},
		"an empty file": {func(t *testing.T, _ *running, dir string) {
			require.NoError(t, os.Truncate(filepath.Join(dir, file), 0))
		}, "", nil},
		"a file of others": {func(t *testing.T, _ *running, dir string) {
			require.NoError(t, os.Mkdir(filepath.Join(dir, "x"), 0o700))
			require.NoError(t, os.Remove(filepath.Join(dir, file)))
			require.NoError(t, os.Rename(filepath.Join(dir, "x"), filepath.Join(dir, file)))
		}, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			path, do := inNamespace(t)
			dir := t.TempDir()
			cluster := somewhere(t)
			ask := func() (string, error) { return askFrom(do) }
			begin := func() (*running, capture.Backend) { return startCapturing(t, path, dir) }
			restore := func(r *running) { r.restoreCaptured(t) }
			r, backend := begin()
			require.NoError(t, r.Store.SavePod(pods.Pod{UID: uid, Namespace: "ns", Name: "a", Trust: v1alpha1.TrustMesh}))
			require.NoError(t, r.Store.SaveCluster(cluster))
			require.NoError(t, r.Store.SavePolicy(state.Saved{PodPolicy: policyOf("1", good), Since: time.Now()}))
			restore(r)
			said, err := ask()
			require.NoError(t, err)
			require.Contains(t, said, "CircuitBreaker ns/good")
			require.NoError(t, r.do(t.Context(), func() error { r.departure.stop(); return nil }))
			_ = backend.Close()
			_, err = ask()
			require.ErrorIs(t, err, unix.ECONNREFUSED)

			next, backend := begin()
			tc.saved(t, next, dir)
			restore(next)
			for _, p := range tc.sent {
				setPolicy(t, next, p)
			}
			check := func() {
				t.Helper()
				said, err := ask()
				if tc.says == "" {
					require.ErrorIs(t, err, unix.ECONNREFUSED)
					return
				}
				require.NoError(t, err)
				require.Contains(t, said, "403 Forbidden")
				require.Contains(t, said, tc.says)
			}
			check()
			_, err = next.Incumbent().Offer(t.Context())
			require.NoError(t, err)
			require.NoError(t, next.Incumbent().Resume(t.Context()))
			check()

			require.NoError(t, next.do(t.Context(), func() error { next.departure.stop(); return nil }))
			_ = backend.Close()
			next, _ = begin()
			restore(next)
			check()
			require.NoError(t, next.do(t.Context(), func() error { next.pods[uid].state.Presence = lifecycle.Listed; return nil }))
			setPolicy(t, next, policyOf("2", good))
			said, err = ask()
			require.NoError(t, err)
			require.Contains(t, said, "CircuitBreaker ns/good")
		})
	}
}
