package capture

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
)

// TestHandOver is an upgrade as it should be: no connection is refused, and none goes around.
func TestHandOver(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		if cfg.Mode == Address {
			t.Skip("agents that overlap have addresses of their own")
		}
		w := newWorld(t)
		pod := w.pod()
		h := (*hammer)(nil)
		var last Backend
		var files *Files
		for _, name := range []string{"first", "second", "third"} {
			m := w.agent(cfg)
			r := request(m, uid, pod)
			r.Files = files
			p, err := m.Capture(r)
			require.NoError(t, err)
			answer(t, name, p.Listeners()...)
			if h == nil {
				h = startHammer(t, pod, listed...)
			} else {
				before := last.(*node).pods[uid]
				require.Equal(t, before.port, p.port, "the redirection has not changed")
				require.NoError(t, before.Abandon())
				// An agent on its way out leaves the pod alone, but ends what it began.
				require.NoError(t, last.SetDestinations(listed, agents))
				require.NoError(t, last.Sweep(func(string) bool { return true }))
				require.NoError(t, before.SetFailOpen(true))
				who, _, err := dialAnswer(before, service4)
				require.NoError(t, err)
				require.Equal(t, "direct", who)
				require.NoError(t, before.Release())
				require.NoError(t, last.Close())
				_, _, err = dialAnswer(before, service4)
				require.ErrorIs(t, err, os.ErrClosed)
			}
			h.await(20)
			files, err = p.Files()
			require.NoError(t, err)
			require.Len(t, files.Listeners, 2)
			for _, f := range files.Listeners {
				// Sending a file takes its number, and must not make the listener block.
				flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
				require.NoError(t, err)
				require.NotZero(t, flags&unix.O_NONBLOCK)
			}
			last = m
		}
		files.Close()
		counts := h.stop()
		require.Len(t, counts, 3, "a connection failed, or went direct")
		require.NotZero(t, counts["third"])
	})
}

// TestHandedNonsense hands over what is no listener of the pod's.
func TestHandedNonsense(t *testing.T) {
	w := newWorld(t)
	pod, elsewhere := w.pod(), w.pod()
	m := agent(t, iptablesConfig(t))
	listenIn := func(n *ns, network, at string, config net.ListenConfig) *os.File {
		var f *os.File
		config.SetMultipathTCP(false)
		require.NoError(t, n.do(func() error {
			l, err := config.Listen(t.Context(), network, at)
			if err != nil {
				return err
			}
			defer l.Close()
			f, err = duplicate(l.(*net.TCPListener))
			return err
		}))
		return f
	}
	plain := func(kind, protocol int) *os.File {
		fd, err := unix.Socket(unix.AF_INET, kind, protocol)
		require.NoError(t, err)
		return os.NewFile(uintptr(fd), "socket")
	}
	pipe, other, err := os.Pipe()
	require.NoError(t, err)
	defer other.Close()
	closed := plain(unix.SOCK_STREAM, 0)
	require.NoError(t, closed.Close())
	for name, f := range map[string]*os.File{
		"another pod's":      listenIn(elsewhere, "tcp", "127.0.0.1:0", net.ListenConfig{}),
		"for all addresses":  listenIn(pod, "tcp4", "0.0.0.0:0", net.ListenConfig{}),
		"for all, of IPv6":   listenIn(pod, "tcp6", "[::]:0", net.ListenConfig{}),
		"with a shared port": listenIn(pod, "tcp", "127.0.0.1:0", net.ListenConfig{Control: reusePort}),
		"not listening":      plain(unix.SOCK_STREAM, 0),
		"UDP":                plain(unix.SOCK_DGRAM, 0),
		"a pipe":             pipe,
		"closed":             closed,
	} {
		t.Run(name, func(t *testing.T) {
			r := request(m, uid, pod)
			r.Files = &Files{Listeners: []*os.File{f}}
			p, err := m.Capture(r)
			require.NoError(t, err)
			_, err = f.Stat()
			require.ErrorIs(t, err, os.ErrClosed, "it was taken over")
			answer(t, "mesh", p.Listeners()...)
			for _, to := range listed {
				who, _, err := client{}.connect(pod, to)
				require.NoError(t, err)
				require.Equal(t, "mesh", who)
			}
			require.NoError(t, p.Release())
		})
	}

	// What is handed over is closed though nothing comes of it.
	f := plain(unix.SOCK_STREAM, 0)
	_, err = m.Capture(Request{UID: "none", Files: &Files{Listeners: []*os.File{f}}})
	require.Error(t, err)
	_, err = f.Stat()
	require.ErrorIs(t, err, os.ErrClosed)

	// One listener of two is of use, if the other can be had.
	half := listenIn(pod, "tcp", "127.0.0.1:0", net.ListenConfig{})
	port := func() int {
		at, err := unix.Getsockname(int(half.Fd()))
		require.NoError(t, err)
		return at.(*unix.SockaddrInet4).Port
	}()
	r := request(m, uid, pod)
	r.Files = &Files{Listeners: []*os.File{half}}
	p, err := m.Capture(r)
	require.NoError(t, err)
	require.Len(t, p.Listeners(), 2)
	require.Equal(t, port, int(p.port))
}

// TestStopLetsFailOpenPodsGo is an agent that stops for good: pods that fail open go direct, the others stay captured.
func TestStopLetsFailOpenPodsGo(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		if cfg.Mode != IPTables {
			t.Skip("without an agent the hook decides, or the address is nobody's")
		}
		w := newWorld(t)
		uids := []string{"00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002", "00000000-0000-4000-8000-000000000003"}
		pods := []*ns{w.pod(), w.pod(), w.pod()}
		m := w.agent(cfg)
		var captured []*Pod
		for i, failOpen := range []bool{false, true, false} {
			r := request(m, uids[i], pods[i])
			r.FailOpen = failOpen
			p, err := m.Capture(r)
			require.NoError(t, err)
			answer(t, "mesh", p.Listeners()...)
			captured = append(captured, p)
		}
		require.NoError(t, captured[2].SetFailOpen(true))
		require.NoError(t, m.Close())
		for _, to := range listed {
			_, _, err := client{}.connect(pods[0], to)
			require.ErrorIs(t, err, unix.ECONNREFUSED)
			for _, pod := range pods[1:] {
				who, _, err := client{}.connect(pod, to)
				require.NoError(t, err)
				require.Equal(t, "direct", who)
			}
		}
	})
}

// TestPodsOwnPorts is a pod that uses the ports that such proxies like, and those of its own loopback.
func TestPodsOwnPorts(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		var own []net.Listener
		require.NoError(t, pod.do(func() error {
			for port := uint16(15000); port <= 16000; port++ {
				l, err := net.Listen("tcp", netip.AddrPortFrom(loopback4, port).String())
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
			who, _, err := client{}.connect(pod, l.Addr().(*net.TCPAddr).AddrPort())
			require.NoError(t, err)
			require.Equal(t, "own", who)
		}
		for _, to := range destinations(cfg) {
			who, _, err := client{}.connect(pod, to)
			require.NoError(t, err)
			require.Equal(t, "mesh", who)
		}
	})
}

// TestWaysSideBySide captures each pod in its own way, on one node.
func TestWaysSideBySide(t *testing.T) {
	w := newWorld(t)
	cfg := backends[0].config(t)
	cfg.Mode, cfg.Address = Auto, ":7443"
	m := w.agent(cfg)
	require.Equal(t, []Mode{EBPF, IPTables, Address}, m.Modes())
	require.Empty(t, m.Unavailable())
	for mode, want := range map[Mode]Mode{Auto: EBPF, EBPF: EBPF, IPTables: IPTables, Address: Address} {
		pod := w.pod()
		u := []byte(uid)
		u[0] = byte('0' + w.pods)
		p, err := m.Capture(Request{UID: string(u), NetNS: pod.path, Mode: mode})
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

// TestRulesAreMended is somebody who flushes them.
func TestRulesAreMended(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		if cfg.Mode != IPTables {
			t.Skip("has no rules")
		}
		w := newWorld(t)
		pod := w.pod()
		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		tables := p.redirector.(*iptables.Backend).Tables
		damage := func(rules string) func(iptables.Table) error {
			return func(table iptables.Table) error { return table.Restore(t.Context(), "*nat\n"+rules+"\nCOMMIT\n") }
		}
		for name, damage := range map[string]func(iptables.Table) error{
			"chain flushed":  damage("-F " + iptables.Chain),
			"OUTPUT flushed": damage("-F OUTPUT"),
			"all removed":    func(table iptables.Table) error { return table.Remove(t.Context(), 0, nil) },
			"jump not first": damage("-I OUTPUT 1 -p tcp -j ACCEPT"),
			"jumps doubled":  damage("-I OUTPUT 1 -j " + iptables.Chain),
			"a rule added":   damage("-I " + iptables.Chain + " 1 -p tcp -j ACCEPT"),
			"rules reversed": damage("-A " + iptables.Chain + " " + fmt.Sprintf("-m mark --mark %#x -j RETURN", iptables.Mark)),
		} {
			t.Run(name, func(t *testing.T) {
				for _, table := range tables {
					require.NoError(t, pod.do(func() error { return damage(table) }))
				}
				require.NoError(t, p.redirector.Apply(t.Context(), p.target()))
				for _, to := range listed {
					who, _, err := client{}.connect(pod, to)
					require.NoError(t, err)
					require.Equal(t, "mesh", who)
				}
				for _, table := range tables {
					require.NoError(t, pod.do(func() error {
						program := map[int]string{4: "iptables", 6: "ip6tables"}[table.Family]
						listing, err := exec.Command(program, "-t", "nat", "-S", "OUTPUT").Output()
						require.NoError(t, err)
						require.Equal(t, "-A OUTPUT -j "+iptables.Chain, strings.Split(string(listing), "\n")[1])
						return nil
					}))
				}
			})
		}
	})
}

// TestDoubledJumps do not keep the rules from going.
func TestDoubledJumps(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		if cfg.Mode != IPTables {
			t.Skip("has no rules")
		}
		for _, jumps := range []int{0, 1, 2, 5} {
			w := newWorld(t)
			pod := w.pod()
			p := captured(t, w.agent(cfg), uid, pod, "mesh")
			for _, table := range p.redirector.(*iptables.Backend).Tables {
				require.NoError(t, pod.do(func() error {
					return table.Restore(t.Context(), "*nat\n-F OUTPUT\n"+strings.Repeat("-A OUTPUT -j "+iptables.Chain+"\n", jumps)+"COMMIT\n")
				}))
			}
			require.NoError(t, p.Release())
			for _, to := range listed {
				who, _, err := client{}.connect(pod, to)
				require.NoError(t, err)
				require.Equal(t, "direct", who)
			}
		}
	})
}
