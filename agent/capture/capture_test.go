package capture

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/ebpf"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/listener"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

func TestConnectArrivesAtTheListener(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		pod4, pod6 := pod.addresses(1)
		captured(t, w.agent(cfg), uid, pod, "mesh")
		to4, to6, service := service4, service6, "mesh"
		if cfg.Mode == Address {
			to4, to6, service = agent4, agent6, "direct"
		}

		for _, test := range []struct {
			name   string
			client client
			to     netip.AddrPort
			want   string
		}{
			{"v4", client{}, to4, "mesh"},
			{"v6", client{}, to6, "mesh"},
			{"v4 Service", client{}, service4, service},
			{"v6 Service", client{}, service6, service},
			{"v4 endpoint", client{}, endpoint4, service},
			{"v6 endpoint", client{}, endpoint6, service},
			{"v4 address of the agents", client{}, agent4, "mesh"},
			{"v6 address of the agents", client{}, agent6, "mesh"},
			{"v4-mapped", client{mapped: true}, to4, "mesh"},
			{"V6ONLY", client{v6only: true}, to6, "mesh"},
			{"v4 bound to its own address", client{bind: pod4}, to4, "mesh"},
			{"v6 bound to its own address", client{bind: pod6}, to6, "mesh"},
			{"v4-mapped bound to its own address", client{bind: pod4, mapped: true}, to4, "mesh"},
			{"v4 MPTCP", client{protocol: unix.IPPROTO_MPTCP}, to4, "mesh"},
			{"v6 MPTCP", client{protocol: unix.IPPROTO_MPTCP}, to6, "mesh"},
			{"v4 fast open", client{fastopen: true}, to4, "mesh"},
			{"v6 fast open", client{fastopen: true}, to6, "mesh"},
			{"v4 fast open at connect", client{fastopenConnect: true}, to4, "mesh"},
			{"v6 fast open at connect", client{fastopenConnect: true}, to6, "mesh"},
			{"v4 unlisted port", client{}, other4, "direct"},
			{"v6 unlisted address", client{}, other6, "direct"},
			{"v4-mapped unlisted", client{mapped: true}, other4, "direct"},
		} {
			t.Run(test.name, func(t *testing.T) {
				if test.client.protocol == unix.IPPROTO_MPTCP {
					needs.Path(t, "/proc/sys/net/mptcp", "a kernel with MPTCP")
				}
				who, _, err := test.client.connect(pod, test.to)
				require.NoError(t, err)
				require.Equal(t, test.want, who)
			})
		}

		for name, to := range map[string]netip.AddrPort{"v4": to4, "v6": to6} {
			t.Run(name+" bound to a device", func(t *testing.T) {
				// Refused by BPF, redirected by iptables: in no case direct.
				who, _, err := client{device: "eth0", patience: 200 * time.Millisecond}.connect(pod, to)
				require.NotEqual(t, "direct", who)
				switch cfg.Mode {
				case EBPF:
					require.ErrorIs(t, err, unix.EPERM)
				case Address:
					require.Equal(t, "mesh", who)
				}
			})
		}

		t.Run("uncaptured pod", func(t *testing.T) {
			stranger := w.pod()
			for _, to := range listed {
				requireAnswer(t, stranger, client{}, to, "direct", "")
			}
		})
	})
}

func TestDialIsNotRedirected(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		pod4, pod6 := pod.addresses(1)
		p := captured(t, w.agent(cfg), uid, pod, "mesh")

		var wg sync.WaitGroup
		for range 16 {
			for _, to := range listed {
				wg.Go(func() {
					source := pod4
					if to.Addr().Is6() {
						source = pod6
					}
					who, from, err := dialAnswer(p, to)
					if err != nil || who != "direct" || from != source.String() {
						t.Errorf("dial %s: answered by %q, seen as %q, error %v", to, who, from, err)
					}
				})
			}
		}
		wg.Wait()

		// The same process, the same namespace, but not the agent's dial.
		for _, to := range destinations(cfg) {
			requireAnswer(t, pod, client{}, to, "mesh", "")
		}

		ctx, cancel := context.WithCancel(context.Background())
		for _, bad := range [][2]string{
			{"tcp", "localhost:443"}, {"tcp", "198.19.0.1"}, {"tcp", "0.0.0.0:443"}, {"tcp", "[::]:443"}, {"tcp", "[fe80::1%eth0]:443"},
			{"tcp", "198.19.0.1:0"}, {"tcp6", "198.19.0.1:443"}, {"tcp4", "[fd00:19::1]:443"}, {"udp", "198.19.0.1:443"}, {"tcp", ""},
		} {
			_, err := p.DialContext(ctx, bad[0], bad[1])
			require.Error(t, err, bad)
		}
		cancel()
		_, err := p.DialContext(ctx, "tcp", service4.String())
		require.ErrorContains(t, err, "canceled")
		_, err = p.DialContext(context.Background(), "tcp", "198.19.0.1:1")
		require.ErrorIs(t, err, unix.ECONNREFUSED)
		// Here package net makes a second socket, which must not be used.
		require.NoError(t, pod.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40000"), 0) }))
		held, err := p.DialContext(context.Background(), "tcp", other4.String())
		require.NoError(t, err)
		defer held.Close()
		_, err = p.DialContext(context.Background(), "tcp", other4.String())
		require.ErrorIs(t, err, unix.EADDRNOTAVAIL)

		// No thread was left behind in the pod's network namespace.
		requireHome(t)
		require.NoError(t, p.Release())
		_, err = p.DialContext(context.Background(), "tcp", service4.String())
		require.ErrorIs(t, err, os.ErrClosed)
	})
}

// requireHome requires every thread that goroutines may run on to be in the process's network namespace.
func requireHome(t *testing.T) {
	t.Helper()
	own, err := os.Readlink(netns.Own)
	require.NoError(t, err)
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			here, err := os.Readlink(netns.Own)
			if err != nil || here != own {
				t.Errorf("a goroutine runs in %s, not %s: %v", here, own, err)
			}
			time.Sleep(time.Millisecond)
		})
	}
	wg.Wait()
}

func TestConnectsAreRefusedWithoutAnAgent(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		m := w.agent(cfg)
		captured(t, m, uid, pod, "mesh")
		require.NoError(t, m.Close())
		for _, to := range destinations(cfg) {
			_, _, err := client{}.connect(pod, to)
			require.ErrorIs(t, err, unix.ECONNREFUSED)
		}
		_, _, err := client{mapped: true}.connect(pod, destinations(cfg)[0])
		require.ErrorIs(t, err, unix.ECONNREFUSED)

		_, err = m.Capture(request(m, uid, pod))
		require.ErrorIs(t, err, os.ErrClosed)
		require.ErrorIs(t, m.SetDestinations(listed, nil), os.ErrClosed)
		require.NoError(t, m.Close())
	})
}

func TestRedirectionIsReplacedAtomically(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		h := startHammer(t, pod, destinations(cfg)...)
		for range 5 {
			require.NoError(t, p.redirector.Apply(t.Context(), p.target()))
			h.await(8)
		}
		counts := h.stop()
		require.Len(t, counts, 1)
		require.NotZero(t, counts["mesh"])
	})
}

func TestDestinationsAreReplacedWithoutDirectConnects(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) { // mode Address has a single destination: the agent
		w := newWorld(t)
		pod := w.pod()
		m := w.agent(cfg)
		captured(t, m, uid, pod, "mesh")

		// Two stay, the other two come and go.
		h := startHammer(t, pod, service4, service6)
		for i := range 20 {
			set := []netip.AddrPort{service4, service6}
			if i%2 == 1 {
				set = listed
			}
			require.NoError(t, m.SetDestinations(set, nil))
			who, _, err := client{}.connect(pod, endpoint4)
			require.NoError(t, err)
			require.Equal(t, map[int]string{0: "direct", 1: "mesh"}[i%2], who)
			h.await(4)
		}
		counts := h.stop()
		require.Len(t, counts, 1)
		require.NotZero(t, counts["mesh"])

		require.Error(t, m.SetDestinations(nil, nil), "would open every pod")
		require.Error(t, m.SetDestinations([]netip.AddrPort{{}}, nil))
		require.Error(t, m.SetDestinations([]netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:443")}, nil))
		// A mapped address and a double are no other destination.
		mapped := netip.AddrPortFrom(netip.AddrFrom16(endpoint4.Addr().As16()), endpoint4.Port())
		require.NoError(t, m.SetDestinations([]netip.AddrPort{mapped, endpoint4}, nil))
		requireAnswer(t, pod, client{}, endpoint4, "mesh", "")
		requireAnswer(t, pod, client{}, service6, "direct", "")
	})
}

func TestReleaseClosesTheNetworkNamespace(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		require.NoError(t, p.Release())
		require.NoError(t, p.Release(), "twice")
		for _, to := range destinations(cfg) {
			requireAnswer(t, pod, client{}, to, released(cfg), "")
		}
		requireGone(t, w, pod)
	})
}

// requireGone closes the pod's network namespace and requires that it really goes.
func requireGone(t *testing.T, w *world, pod *ns) {
	t.Helper()
	pod.Close()
	require.Eventually(t, func() bool {
		_, err := w.server.Link.LinkByName("pod1")
		return err != nil
	}, soon, 10*time.Millisecond, "the network namespace lives on")
}

func TestCloseClosesTheNetworkNamespaces(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		m := w.agent(cfg)
		captured(t, m, uid, pod, "mesh")
		require.NoError(t, m.Close())
		requireGone(t, w, pod)
	})
}

func TestSecondCaptureReturnsTheSamePod(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		m := w.agent(cfg)
		p := captured(t, m, uid, pod, "mesh")
		same, err := m.Capture(request(m, uid, pod))
		require.NoError(t, err)
		require.Same(t, p, same)

		// The same pod in a new sandbox.
		anew := w.pod()
		q := captured(t, m, uid, anew, "anew")
		require.NotSame(t, p, q)
		requireAnswer(t, anew, client{}, destinations(cfg)[0], "anew", "")
		_, err = p.Listeners()[0].Accept()
		require.ErrorIs(t, err, net.ErrClosed)
		require.NoError(t, p.Release(), "released already")
		requireGone(t, w, pod)
	})
}

func TestSweepReleasesDeletedPods(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		uids := []string{"00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002", "00000000-0000-4000-8000-000000000003"}
		pods := []*ns{w.pod(), w.pod(), w.pod()}
		first := w.agent(cfg)
		for i := range pods {
			captured(t, first, uids[i], pods[i], "first")
		}
		require.NoError(t, first.Close())

		second := w.agent(cfg)
		captured(t, second, uids[0], pods[0], "second")
		captured(t, second, uids[1], pods[1], "second")
		require.NoError(t, second.Sweep(func(u string) bool { return u == uids[0] }))

		for i, want := range []string{"second", released(cfg)} {
			requireAnswer(t, pods[i], client{}, destinations(cfg)[0], want, "")
		}
		if cfg.Mode == EBPF {
			n := second.(*node)
			for _, pod := range pods[1:] {
				var cookie uint64
				require.NoError(t, pod.Do(func() (err error) { cookie, err = netns.Cookie(); return err }))
				_, ok, err := n.modes[0].redirector.(*ebpf.Backend).Pod(bpf.ByCookie(cookie))
				require.NoError(t, err)
				require.False(t, ok)
			}
		}
	})
}

func TestInvalidRequestsAreRejected(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		m, err := Open(cfg)
		require.NoError(t, err)
		defer m.Close()
		capture := func(uid, path string) error {
			_, err := m.Capture(Request{UID: uid, NetNS: path, Mode: m.Modes()[0]})
			return err
		}
		require.ErrorContains(t, capture(uid, pod.Path), "no destinations")
		require.NoError(t, m.SetDestinations(listed, nil))

		require.ErrorIs(t, capture(uid, netns.Own), ErrHostNetwork)
		require.ErrorIs(t, capture(uid, filepath.Join(t.TempDir(), "gone")), os.ErrNotExist)
		require.ErrorIs(t, capture(uid, "/proc/self/ns/mnt"), unix.EINVAL)
		for _, bad := range []string{"", "pod", "{" + uid + "}", "3A1F0C52-6A53-4F0E-8E0A-0F4B1F9F6D11"} {
			require.ErrorContains(t, capture(bad, pod.Path), "not a UUID")
		}
		_, err = m.Capture(Request{UID: uid, NetNS: pod.Path, Mode: "else"})
		require.ErrorContains(t, err, `"else"`)
		if cfg.Mode != EBPF {
			_, err = m.Capture(Request{UID: uid, NetNS: netns.Own, Mode: cfg.Mode, HostNetwork: true, Cgroup: 1})
			require.ErrorIs(t, err, ErrHostNetwork)
			require.ErrorIs(t, m.HostNetwork(), ErrHostNetwork)
		}
		requireHome(t)
	})
}

func TestCleanupRemovesEveryTrace(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		m := w.agent(cfg)
		captured(t, m, uid, pod, "mesh")
		require.NoError(t, m.Close())

		paths := []string{pod.Path, netns.Own, filepath.Join(t.TempDir(), "gone")}
		require.NoError(t, Cleanup(cfg.PinDir, paths...))
		for _, to := range listed {
			requireAnswer(t, pod, client{}, to, "direct", "")
		}
		require.NoFileExists(t, cfg.PinDir)
		require.NoError(t, Cleanup(cfg.PinDir, paths...), "twice")
	})
}

func TestPodsWithoutIPv6AreCaptured(t *testing.T) {
	for name, device := range map[string]string{"nowhere": "all", "not on lo": "lo"} {
		t.Run(name, func(t *testing.T) {
			forEachBackend(t, func(t *testing.T, cfg Config) {
				w := newWorld(t)
				pod := w.pod()
				disable := func(value string) {
					require.NoError(t, pod.Do(func() error {
						return os.WriteFile("/proc/sys/net/ipv6/conf/"+device+"/disable_ipv6", []byte(value), 0)
					}))
				}
				disable("1")
				captured(t, w.agent(cfg), uid, pod, "mesh")
				to := destinations(cfg)
				for _, c := range []client{{}, {mapped: true}} {
					who, _, err := c.connect(pod, to[0])
					require.NoError(t, err)
					require.Equal(t, "mesh", who)
				}
				_, _, err := client{patience: 200 * time.Millisecond}.connect(pod, service6)
				if cfg.Mode == Address {
					return // what it may not reach, it has no way to
				}
				require.Error(t, err, "IPv6 cannot reach the listener, and must not go direct")

				// It comes while the pod runs.
				disable("0")
				pod.again6()
				requireAnswer(t, pod, client{}, service6, "mesh", "")
			})
		})
	}
}

func TestListenersShareNoPort(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) { // mode Address opens no listener in the pod
		w := newWorld(t)
		pod := w.pod()
		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		require.Len(t, p.Listeners(), 2)
		for _, l := range p.Listeners() {
			require.Equal(t, int(p.known.Port), l.Addr().(*net.TCPAddr).Port)
		}
		for _, address := range []string{"127.0.0.1", "0.0.0.0", "::1", "::"} {
			at := netip.AddrPortFrom(netip.MustParseAddr(address), p.known.Port)
			config := net.ListenConfig{Control: reusePort}
			require.ErrorIs(t, pod.Do(func() error {
				l, err := config.Listen(context.Background(), "tcp", at.String())
				if err == nil {
					l.Close()
				}
				return err
			}), unix.EADDRINUSE, at)
		}
	})
}

func TestAutoOpensAllModesThatWork(t *testing.T) {
	cfg := byEBPF.config(t)
	cfg.Mode = Auto
	cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	require.Equal(t, EBPF, agent(t, cfg).Modes()[0])

	elsewhere := cfg
	elsewhere.PinDir = t.TempDir() // no bpffs
	require.Equal(t, IPTables, agent(t, elsewhere).Modes()[0])

	rootless := cfg
	rootless.CgroupRoot = ""
	require.Equal(t, IPTables, agent(t, rootless).Modes()[0])
	rootless.Mode = EBPF
	_, err := Open(rootless)
	require.ErrorIs(t, err, bpf.ErrUnsupported)

	_, err = Open(Config{Mode: "else"})
	require.ErrorContains(t, err, `"else"`)
	t.Setenv("PATH", t.TempDir()) // no iptables
	_, err = Open(elsewhere)
	require.ErrorIs(t, err, bpf.ErrUnsupported)
	require.ErrorContains(t, err, "iptables")
	elsewhere.Address = "127.0.0.1:0"
	m, err := Open(elsewhere)
	require.NoError(t, err, "one way is enough")
	defer m.Close()
	require.Equal(t, []Mode{Address}, m.Modes())
	require.ErrorIs(t, m.Unavailable()[EBPF], bpf.ErrUnsupported)
	require.ErrorContains(t, m.Unavailable()[IPTables], "iptables")
	require.NoError(t, m.SetDestinations(listed, nil))
	// What it cannot, it says why.
	_, err = m.Capture(Request{UID: uid, NetNS: "/dev/null"})
	require.ErrorIs(t, err, bpf.ErrUnsupported)
	_, err = m.Capture(Request{UID: uid, NetNS: "/dev/null", Mode: IPTables})
	require.ErrorContains(t, err, "iptables")
}

func TestThreadInAnotherNamespaceServesNoGoroutine(t *testing.T) {
	pod := newWorld(t).pod()
	usual := netns.Own
	netns.Own = "/proc/thread-self/ns/mnt" // no way back by this
	err := netns.Do(pod.File, func() error { return nil })
	netns.Own = usual
	require.ErrorIs(t, err, unix.EINVAL)
	require.ErrorContains(t, err, "leaving the pod's network namespace")
	requireHome(t)
}

func TestCloseLetsFailOpenPodsGoDirect(t *testing.T) {
	with(t, byIPTables, func(t *testing.T, cfg Config) { // only mode IPTables removes a redirection when it closes
		w := newWorld(t)
		uids := []string{"00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002", "00000000-0000-4000-8000-000000000003"}
		pods := []*ns{w.pod(), w.pod(), w.pod()}
		m := w.agent(cfg)
		var captured []*Pod
		for i, failOpen := range []bool{false, true, false} {
			r := request(m, uids[i], pods[i])
			r.FailOpen = failOpen
			p := capturedBy(t, m, r, "mesh")
			captured = append(captured, p)
		}
		require.NoError(t, captured[2].SetFailOpen(true))
		require.NoError(t, m.Close())
		for _, to := range listed {
			_, _, err := client{}.connect(pods[0], to)
			require.ErrorIs(t, err, unix.ECONNREFUSED)
			for _, pod := range pods[1:] {
				requireAnswer(t, pod, client{}, to, "direct", "")
			}
		}
	})
}

func TestPodKeepsItsOwnPorts(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		var own []net.Listener
		require.NoError(t, pod.Do(func() error {
			for port := uint16(15000); port <= 16000; port++ {
				l, err := net.Listen("tcp", netip.AddrPortFrom(listener.Loopback4, port).String())
				if err != nil {
					return err
				}
				own = append(own, l)
			}
			l, err := net.Listen("tcp", "127.0.0.1:443") // the port of the Service
			own = append(own, l)
			return err
		}))
		answer(t, "own", own...)
		captured(t, w.agent(cfg), uid, pod, "mesh")
		for _, l := range own[len(own)-3:] {
			requireAnswer(t, pod, client{}, l.Addr().(*net.TCPAddr).AddrPort(), "own", "")
		}
		for _, to := range destinations(cfg) {
			requireAnswer(t, pod, client{}, to, "mesh", "")
		}
	})
}

func TestPodsOfOneNodeUseDifferentModes(t *testing.T) {
	w := newWorld(t)
	cfg := byEBPF.config(t)
	cfg.Mode, cfg.Address = Auto, ":7443"
	m := w.agent(cfg)
	require.Equal(t, []Mode{EBPF, IPTables, Address}, m.Modes())
	require.Empty(t, m.Unavailable())
	for mode, want := range map[Mode]Mode{Auto: EBPF, EBPF: EBPF, IPTables: IPTables, Address: Address} {
		pod := w.pod()
		u := []byte(uid)
		u[0] = byte('0' + w.pods)
		p, err := m.Capture(Request{UID: string(u), NetNS: pod.Path, Mode: mode})
		require.NoError(t, err)
		require.Equal(t, want, p.Mode())
		answer(t, "mesh", p.Listeners()...)
		for _, to := range agents {
			who, _, err := client{}.connect(pod, to)
			require.NoError(t, err)
			require.Equal(t, "mesh", who, mode)
		}
		who, _, err := client{}.connect(pod, service4)
		require.NoError(t, err)
		require.Equal(t, want == Address, who == "direct", mode)
		who, source, err := dialAnswer(p, service4)
		require.NoError(t, err)
		pod4, _ := pod.addresses(w.pods)
		require.Equal(t, "direct "+pod4.String(), who+" "+source)
	}
}
