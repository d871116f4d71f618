package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
	proxied "github.com/ctrlmesh/ctrlmesh/proxy/egress"
)

// egressPorts are all that other4 and other6 are reached at, and the apiservers too.
var egressPorts = []uint16{443, 6443}

// relays says who it is, and where each connection was to go.
func relays(t testing.TB, name string, listeners []net.Listener) {
	t.Helper()
	for _, l := range listeners {
		accept(t, l, func(c net.Conn) {
			go func() {
				fmt.Fprintf(c, "%s %s", name, c.(proxied.Conn).To())
				c.Close()
			}()
		})
	}
}

func setEgress(t testing.TB, p *Pod, name string, ports ...uint16) []net.Listener {
	t.Helper()
	listeners, err := p.SetEgress(ports)
	require.NoError(t, err)
	if name != "" {
		relays(t, name, listeners)
	}
	return listeners
}

func requireAnswer(t testing.TB, pod *ns, c client, to netip.AddrPort, who, seen string) {
	t.Helper()
	got, said, err := c.connect(pod, to)
	require.NoError(t, err, to)
	require.Equal(t, who, got, to)
	if seen != "" {
		require.Equal(t, seen, said)
	}
}

// datagram sends one from the pod: what a client of HTTP/3 does first.
func datagram(pod *ns, to netip.AddrPort, connected bool) error {
	return pod.Do(func() error {
		family := unix.AF_INET
		if to.Addr().Is6() {
			family = unix.AF_INET6
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if !connected {
			return unix.Sendto(fd, []byte("x"), 0, sockaddr(to, family))
		}
		if err := unix.Connect(fd, sockaddr(to, family)); err != nil {
			return err
		}
		_, err = unix.Write(fd, []byte("x"))
		return err
	})
}

func requireDatagrams(t testing.TB, pod *ns, refused bool, to ...netip.AddrPort) {
	t.Helper()
	for _, to := range to {
		for _, connected := range []bool{false, true} {
			err := datagram(pod, to, connected)
			if !refused {
				require.NoError(t, err, to)
			} else if !errors.Is(err, unix.ECONNREFUSED) {
				require.ErrorIs(t, err, unix.EPERM, to)
			}
		}
	}
}

func TestEgressConnectsArriveAtTheirListener(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		pod4, pod6 := pod.addresses(1)
		var own []net.Listener
		for _, at := range []string{"127.0.0.1:443", "[::1]:443", netip.AddrPortFrom(pod4, 443).String(), netip.AddrPortFrom(pod6, 443).String()} {
			require.NoError(t, pod.Do(func() error {
				l, err := net.Listen("tcp", at)
				own = append(own, l)
				return err
			}))
		}
		answer(t, "own", own...)
		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		requireAnswer(t, pod, client{}, other4, "direct", "")
		requireDatagrams(t, pod, false, other4, other6)

		listeners := setEgress(t, p, "egress", egressPorts...)
		require.Len(t, listeners, 2)
		for _, test := range []struct {
			name   string
			client client
			to     netip.AddrPort
			want   string
		}{
			{"v4", client{}, other4, "egress"},
			{"v6", client{}, other6, "egress"},
			{"v4-mapped", client{mapped: true}, other4, "egress"},
			{"V6ONLY", client{v6only: true}, other6, "egress"},
			{"v4 bound to its own address", client{bind: pod4}, other4, "egress"},
			{"v6 bound to its own address", client{bind: pod6}, other6, "egress"},
			{"v4-mapped bound to its own address", client{bind: pod4, mapped: true}, other4, "egress"},
			{"v4 MPTCP", client{protocol: unix.IPPROTO_MPTCP}, other4, "egress"},
			{"v6 MPTCP", client{protocol: unix.IPPROTO_MPTCP}, other6, "egress"},
			{"v4 fast open", client{fastopen: true}, other4, "egress"},
			{"v6 fast open", client{fastopen: true}, other6, "egress"},
			{"v4 fast open at connect", client{fastopenConnect: true}, other4, "egress"},
			{"nobody's address", client{}, netip.MustParseAddrPort("192.0.2.77:443"), "egress"},
			{"v4 Service", client{}, service4, "mesh"},
			{"v6 Service", client{}, service6, "mesh"},
			{"v4 endpoint", client{}, endpoint4, "mesh"},
			{"v4-mapped Service", client{mapped: true}, service4, "mesh"},
			{"loopback", client{}, netip.MustParseAddrPort("127.0.0.1:443"), "own"},
			{"v6 loopback", client{}, netip.MustParseAddrPort("[::1]:443"), "own"},
			{"its own address", client{}, netip.AddrPortFrom(pod4, 443), "own"},
			{"its own v6 address", client{}, netip.AddrPortFrom(pod6, 443), "own"},
		} {
			t.Run(test.name, func(t *testing.T) {
				if test.client.protocol == unix.IPPROTO_MPTCP {
					needs.Path(t, "/proc/sys/net/mptcp", "a kernel with MPTCP")
				}
				who, said, err := test.client.connect(pod, test.to)
				require.NoError(t, err)
				require.Equal(t, test.want, who)
				if who == "egress" {
					require.Equal(t, test.to.String(), said)
				}
			})
		}
		requireDatagrams(t, pod, true, other4, other6)
		requireDatagrams(t, pod, false, netip.AddrPortFrom(other4.Addr(), 53))
		requireDatagrams(t, pod, false, netip.AddrPortFrom(other6.Addr(), 53))
		for _, to := range []netip.AddrPort{other4, other6} {
			who, _, err := dialAnswer(p, to)
			require.NoError(t, err)
			require.Equal(t, "direct", who, "the agent's own")
			who, _, _ = client{device: "eth0", patience: 200 * time.Millisecond}.connect(pod, to)
			require.NotEqual(t, "direct", who, "bound to a device")
		}
		// What connects to the listener itself is hung up on.
		_, _, err := client{}.connect(pod, listeners[0].Addr().(*net.TCPAddr).AddrPort())
		require.Error(t, err)
		stranger := w.pod()
		requireAnswer(t, stranger, client{}, other4, "direct", "")
		requireDatagrams(t, stranger, false, other4)

		// Ports are changed, and removed.
		require.Equal(t, listeners, setEgress(t, p, "", 443, 443, 6443), "nothing new")
		require.Equal(t, listeners, setEgress(t, p, "", 443), "the same listeners")
		requireAnswer(t, pod, client{}, other6, "egress", other6.String())
		requireAnswer(t, pod, client{}, other4, "direct", "")
		requireDatagrams(t, pod, true, other6)
		requireDatagrams(t, pod, false, other4)
		require.Empty(t, setEgress(t, p, ""))
		for _, to := range []netip.AddrPort{other4, other6} {
			requireAnswer(t, pod, client{}, to, "direct", "")
		}
		requireDatagrams(t, pod, false, other4, other6)
		requireAnswer(t, pod, client{}, service4, "mesh", "")
		_, err = listeners[0].Accept()
		require.ErrorIs(t, err, net.ErrClosed)

		setEgress(t, p, "again", 443)
		requireAnswer(t, pod, client{}, other6, "again", "")
		_, err = p.SetEgress([]uint16{0})
		require.Error(t, err)
		require.NoError(t, p.Release())
		requireAnswer(t, pod, client{}, other6, "direct", "")
		requireDatagrams(t, pod, false, other6)
		_, err = p.SetEgress([]uint16{443})
		require.ErrorIs(t, err, os.ErrClosed)
		requireHome(t)
	})
}

// failing fails to redirect so many times.
type failing struct {
	redirector
	times int
}

func (f *failing) Apply(ctx context.Context, p redirect.Pod) error {
	if f.times > 0 {
		f.times--
		return errors.New("not now")
	}
	return f.redirector.Apply(ctx, p)
}

func TestFailedEndOfEgressIsRetried(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		way := &failing{redirector: p.redirector}
		p.redirector = way
		fail := func() {
			t.Helper()
			way.times = 1
			_, err := p.SetEgress(nil)
			require.ErrorContains(t, err, "not now")
			_, _, err = client{}.connect(pod, other4)
			require.ErrorIs(t, err, unix.ECONNREFUSED)
		}
		setEgress(t, p, "first", egressPorts...)
		fail()
		fail()
		setEgress(t, p, "")
		requireAnswer(t, pod, client{}, other4, "direct", "")

		setEgress(t, p, "second", egressPorts...)
		fail()
		setEgress(t, p, "third", egressPorts...)
		requireAnswer(t, pod, client{}, other4, "third", other4.String())
	})
}

func TestEgressIsRejectedInModeAddress(t *testing.T) {
	w := newWorld(t)
	pod := w.pod()
	p := captured(t, w.agent(byAddress.config(t)), uid, pod, "mesh")
	_, err := p.SetEgress([]uint16{443})
	require.ErrorContains(t, err, "captured by address")
	setEgress(t, p, "")
}

// One port stays.
func TestEgressPortsChangeWithoutDirectConnects(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		m := w.agent(cfg)
		p := captured(t, m, uid, pod, "mesh")
		setEgress(t, p, "egress", 443)
		h := startHammer(t, pod, other6)
		for i := range 10 {
			setEgress(t, p, "", append([]uint16{443}, []uint16{6443, 80, 8443}[:i%4]...)...)
			require.NoError(t, m.SetDestinations(listed, agents))
			h.await(4)
		}
		require.Len(t, h.stop(), 1)
		require.NotZero(t, h.counts["egress"])
	})
}

func TestOriginsOfConcurrentEgressAreRight(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		pod4, _ := pod.addresses(1)
		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		setEgress(t, p, "egress", 443)
		var wg sync.WaitGroup
		for worker := range 16 {
			wg.Go(func() {
				for i := range 50 {
					to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + 16*(i%10) + worker)}), 443)
					c := client{mapped: i%2 == 0, patience: 20 * time.Second}
					if i%3 == 0 {
						c.bind = pod4
					}
					if i%5 == 0 {
						to, c = netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf("2001:db8::%x:%x", worker, i)), 443), client{patience: c.patience}
					}
					who, said, err := c.connect(pod, to)
					if err != nil || who != "egress" || said != to.String() {
						t.Errorf("to %s: %s, for %s: %v", to, who, said, err)
					}
				}
			})
		}
		wg.Wait()
	})
}

func TestDirectConnectionsToNewPortsEnd(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		q := w.quiet()
		pod := w.pod()
		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		ended := []*stranger{
			connectStranger(t, pod, "", "4", quiet4),
			connectStranger(t, pod, "", "6", quiet4),
			connectStranger(t, pod, "", "6", quiet6),
			connectStranger(t, pod, "", "udp", quiet4),
		}
		stays := connectStranger(t, pod, "", "4", foreign[0])
		own, err := p.DialContext(t.Context(), "tcp", quiet4.String())
		require.NoError(t, err)
		defer own.Close()
		setEgress(t, p, "egress", 443)
		for _, s := range ended {
			s.requireAborted()
		}
		stays.requireOpen(q)
		require.NoError(t, own.SetReadDeadline(time.Now().Add(soon)))
		_, err = own.Read(make([]byte, 1))
		require.NoError(t, err, "what the agent connects for the pod lives")

		setEgress(t, p, "", 443, 444)
		stays.requireAborted()
	})
}

func TestEgressUnderHostNetworkIsOfOnePod(t *testing.T) {
	cfg := ebpfConfig(t)
	w := newWorld(t)
	node := w.pod()
	q := w.quiet()
	pods := filepath.Join(cfg.CgroupRoot, "kubepods")
	one, two := filepath.Join(pods, "pod1"), filepath.Join(pods, "pod2")
	ids, join := makeCgroups(t, pods, one, two)
	defer join(cfg.CgroupRoot)
	join(one)
	m := w.agent(cfg)
	p := capturedBy(t, m, Request{UID: uid, NetNS: node.Path, HostNetwork: true, Cgroup: ids[one]}, "mesh")
	other, err := m.Capture(Request{UID: "00000000-0000-4000-8000-000000000002", NetNS: node.Path, HostNetwork: true, Cgroup: ids[two]})
	require.NoError(t, err)
	answer(t, "mesh", other.Listeners()...)
	join(cfg.CgroupRoot)

	ended := connectStranger(t, node, one, "4", quiet4)
	stays := connectStranger(t, node, two, "4", quiet4)
	setEgress(t, p, "egress", 443)
	ended.requireAborted()
	stays.requireOpen(q)

	c := check(t, m)
	join(one)
	requireAnswer(t, node, client{}, other6, "egress", other6.String())
	requireAnswer(t, node, client{}, service4, "mesh", "")
	requireDatagrams(t, node, true, other6)
	for _, cgroup := range []string{two, cfg.CgroupRoot} {
		join(cgroup)
		requireAnswer(t, node, client{}, other6, "direct", "")
		requireDatagrams(t, node, false, other6)
	}
	probesOf(t, p, 2)
	require.Empty(t, c.losses())
	join(one)
	setEgress(t, p, "")
	requireAnswer(t, node, client{}, other6, "direct", "")
}

// One pod cannot use the room of all pods of the node.
func TestTooManyEgressPortsAreRejected(t *testing.T) {
	var ports []uint16
	for port := range MaxEgressPorts + 1 {
		ports = append(ports, uint16(port+1))
	}
	_, err := (&Pod{node: &node{}}).SetEgress(ports)
	require.ErrorContains(t, err, "more than the limit of 64")
	_, err = (&Pod{node: &node{}}).SetEgress(append(ports[1:], ports[1]))
	require.ErrorIs(t, err, os.ErrClosed, "it is asked for, were it captured")
}
