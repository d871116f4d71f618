package capture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/program/programtest"
	"github.com/ctrlmesh/ctrlmesh/agent/internal/netnstest"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

// soon is when what must happen has happened, however busy the machine is.
const soon = 30 * time.Second

func TestMain(m *testing.M) {
	if what := os.Getenv(strangerEnv); what != "" {
		strangerMain(what)
		return
	}
	if what := os.Getenv(agentEnv); what != "" {
		agentMain(what)
		return
	}
	bpftest.Main(m)
}

// The addresses of the fake apiservers and of the agents' Service, all in one
// network namespace. Only the first four are listed.
var (
	service4  = netip.MustParseAddrPort("198.19.0.1:443")
	service6  = netip.MustParseAddrPort("[fd00:19::1]:443")
	endpoint4 = netip.MustParseAddrPort("198.19.0.2:6443")
	endpoint6 = netip.MustParseAddrPort("[fd00:19::2]:6443")
	other4    = netip.MustParseAddrPort("198.19.0.1:6443")
	other6    = netip.MustParseAddrPort("[fd00:19::3]:443")
	agent4    = netip.MustParseAddrPort("198.19.0.9:7443")
	agent6    = netip.MustParseAddrPort("[fd00:19::9]:7443")

	listed = []netip.AddrPort{service4, service6, endpoint4, endpoint6}
	agents = []netip.AddrPort{agent4, agent6}
)

const uid = "3a1f0c52-6a53-4f0e-8e0a-0f4b1f9f6d11"

// ns is a network namespace.
type ns struct{ *netnstest.NS }

func newNS(t testing.TB) *ns { return &ns{netnstest.New(t)} }

func (n *ns) route(gateways ...string) {
	n.T.Helper()
	for _, gw := range gateways {
		require.NoError(n.T, n.Link.RouteAdd(&netlink.Route{Gw: net.ParseIP(gw)}))
	}
}

// world is a server namespace with the fake apiservers.
type world struct {
	t      testing.TB
	server *ns
	pods   int
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, server: newNS(t)}
	w.server.Up("lo", "198.19.0.1/32", "198.19.0.2/32", "fd00:19::1/128", "fd00:19::2/128", "fd00:19::3/128", "198.19.0.9/32", "fd00:19::9/128")
	for _, at := range append([]netip.AddrPort{other4, other6}, listed...) {
		answer(t, "direct", w.server.Listen("tcp", at.String()))
	}
	return w
}

// answer accepts connections and says who it is, and to whom.
func answer(t testing.TB, name string, listeners ...net.Listener) {
	t.Helper()
	for _, l := range listeners {
		accept(t, l, func(c net.Conn) {
			go func() {
				fmt.Fprintf(c, "%s %s", name, c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr())
				c.Close()
			}()
		})
	}
}

// accept calls f with each connection until the test ends.
func accept(t testing.TB, l net.Listener, f func(net.Conn)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f(c)
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
}

// makeCgroups makes cgroups, and returns their ids. join moves the test into one.
func makeCgroups(t testing.TB, dirs ...string) (ids map[string]uint64, join func(dir string)) {
	t.Helper()
	ids = map[string]uint64{}
	for _, dir := range dirs {
		bpftest.MakeCgroup(t, dir)
		var st unix.Stat_t
		require.NoError(t, unix.Stat(dir, &st))
		ids[dir] = st.Ino
	}
	return ids, func(dir string) {
		t.Helper()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0))
	}
}

// pod makes a pod's network namespace, with a veth pair to the server's.
func (w *world) pod() *ns {
	w.t.Helper()
	w.pods++
	p := newNS(w.t)
	peer := fmt.Sprintf("pod%d", w.pods)
	require.NoError(w.t, p.Link.LinkAdd(&netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: "eth0"},
		PeerName:      peer,
		PeerNamespace: netlink.NsFd(w.server.File.Fd()),
	}))
	near4, near6 := p.addresses(w.pods)
	far4, far6 := near4.Next(), near6.Next()
	w.server.Up(peer, far4.String()+"/24", far6.String()+"/64")
	p.Up("eth0", near4.String()+"/24", near6.String()+"/64")
	p.route(far4.String(), far6.String())
	return p
}

// again6 gives the world's first pod its IPv6 addresses and route once more.
func (n *ns) again6() {
	n.T.Helper()
	_, near6 := n.addresses(1)
	for device, address := range map[string]string{"lo": "::1/128", "eth0": near6.String() + "/64"} {
		l, err := n.Link.LinkByName(device)
		require.NoError(n.T, err)
		parsed, err := netlink.ParseAddr(address)
		require.NoError(n.T, err)
		parsed.Flags = unix.IFA_F_NODAD
		require.NoError(n.T, n.Link.AddrReplace(l, parsed))
	}
	require.NoError(n.T, n.Link.RouteReplace(&netlink.Route{Gw: near6.Next().AsSlice()}))
}

// addresses are those of the n-th pod.
func (*ns) addresses(n int) (v4, v6 netip.Addr) {
	return netip.AddrFrom4([4]byte{198, 18, byte(n), 1}), netip.MustParseAddr(fmt.Sprintf("fd00:18:%d::1", n))
}

// backend is a way of capture under test, and how to open it again and again.
type backend struct {
	name   string
	config func(t testing.TB) Config
}

var (
	byEBPF = backend{"ebpf", func(t testing.TB) Config {
		programtest.Link(t) // for tests that change the mode
		return Config{Mode: EBPF, CgroupRoot: bpftest.Cgroup(t), PinDir: filepath.Join(bpftest.BPFFS(t), "ctrlmesh")}
	}}
	byIPTables = backend{"iptables", iptablesConfig}
	byAddress  = backend{"address", func(t testing.TB) Config {
		return Config{Mode: Address, Address: ":7443", PinDir: filepath.Join(t.TempDir(), "none")}
	}}
	redirections = []backend{byEBPF, byIPTables}
	backends     = append(slices.Clone(redirections), byAddress)
)

// destinations are where a pod that is captured like this looks for the apiserver.
func destinations(cfg Config) []netip.AddrPort {
	if cfg.Mode == Address {
		return agents
	}
	return listed
}

// released is who answers a pod that is captured no longer, at its destinations.
func released(cfg Config) string {
	if cfg.Mode == Address {
		return "" // the agent hangs up
	}
	return "direct"
}

func iptablesConfig(t testing.TB) Config {
	for _, program := range []string{"iptables", "ip6tables"} {
		needs.Program(t, program)
	}
	programtest.Link(t)
	return Config{Mode: IPTables, PinDir: filepath.Join(t.TempDir(), "none")}
}

// forEachBackend runs a test for every way of capture that the machine has.
func forEachBackend(t *testing.T, test func(t *testing.T, cfg Config)) {
	for _, b := range backends {
		with(t, b, test)
	}
}

// forEachRedirection is forEachBackend without mode Address.
func forEachRedirection(t *testing.T, test func(t *testing.T, cfg Config)) {
	for _, b := range redirections {
		with(t, b, test)
	}
}

// with runs a test for one way of capture.
func with(t *testing.T, b backend, test func(t *testing.T, cfg Config)) {
	t.Run(b.name, func(t *testing.T) {
		cfg := b.config(t)
		cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
		test(t, cfg)
	})
}

// agent opens a backend with the listed destinations.
func agent(t testing.TB, cfg Config) Backend {
	t.Helper()
	m, err := Open(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	m.(*node).rotation = rotation / 5
	require.NoError(t, m.SetDestinations(listed, agents))
	return m
}

// agent is one whose own network namespace is that of the servers.
func (w *world) agent(cfg Config) (m Backend) {
	w.t.Helper()
	require.NoError(w.t, w.server.Do(func() error {
		m = agent(w.t, cfg)
		return nil
	}))
	return m
}

// request asks for a pod to be captured in the best way.
func request(m Backend, uid string, pod *ns) Request {
	return Request{UID: uid, NetNS: pod.Path, Mode: m.Modes()[0]}
}

// captured captures a pod; its listeners answer with name.
func captured(t testing.TB, m Backend, uid string, pod *ns, name string) *Pod {
	t.Helper()
	return capturedBy(t, m, request(m, uid, pod), name)
}

// capturedBy is captured for any request.
func capturedBy(t testing.TB, m Backend, r Request, name string) *Pod {
	t.Helper()
	p, err := m.Capture(r)
	require.NoError(t, err)
	answer(t, name, p.Listeners()...)
	return p
}

// requireDirectDial requires that a dial for the pod is not redirected.
func requireDirectDial(t testing.TB, p *Pod, to netip.AddrPort) {
	t.Helper()
	who, _, err := dialAnswer(p, to)
	require.NoError(t, err)
	require.Equal(t, "direct", who)
}

// client is how a program in a pod connects.
type client struct {
	mapped          bool          // by an IPv6 socket to an IPv4 address
	v6only          bool          // by an IPv6 socket that cannot do that
	bind            netip.Addr    // bound to this address
	device          string        // bound to this device
	protocol        int           // IPPROTO_MPTCP, if not TCP
	fastopen        bool          // with data, without connect()
	fastopenConnect bool          // TCP_FASTOPEN_CONNECT
	patience        time.Duration // 0 means soon
}

// connect connects from the namespace and returns who answered, and the source address they saw.
func (c client) connect(n *ns, to netip.AddrPort) (who, source string, err error) {
	var fd int
	family := unix.AF_INET
	if to.Addr().Is6() || c.mapped {
		family = unix.AF_INET6
	}
	if err := n.Do(func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, c.protocol)
		return err
	}); err != nil {
		return "", "", fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	// No TIME_WAIT, for those who connect thousands of times.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return "", "", err
	}
	if c.v6only {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return "", "", err
		}
	}
	if c.fastopenConnect {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_FASTOPEN_CONNECT, 1); err != nil {
			return "", "", err
		}
	}
	if c.device != "" {
		if err := unix.BindToDevice(fd, c.device); err != nil {
			return "", "", err
		}
	}
	if c.bind.IsValid() {
		if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(c.bind, 0), family)); err != nil {
			return "", "", err
		}
	}
	if c.fastopen {
		err = unix.Sendto(fd, []byte("x"), unix.MSG_FASTOPEN, sockaddr(to, family))
	} else {
		err = unix.Connect(fd, sockaddr(to, family))
	}
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return "", "", fmt.Errorf("connect: %w", err)
	}
	if err := c.wait(fd, unix.POLLOUT); err != nil {
		return "", "", err
	}
	if code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
		return "", "", fmt.Errorf("connect: %w", errors.Join(err, syscall.Errno(code)))
	}
	if err := c.wait(fd, unix.POLLIN); err != nil {
		return "", "", err
	}
	var buffer [100]byte
	length, err := unix.Read(fd, buffer[:])
	if err != nil {
		return "", "", fmt.Errorf("read: %w", err)
	}
	who, source, _ = strings.Cut(string(buffer[:length]), " ")
	return who, source, nil
}

func sockaddr(to netip.AddrPort, family int) unix.Sockaddr {
	if family == unix.AF_INET {
		return &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	return &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
}

func (c client) wait(fd int, events int16) error {
	for deadline := time.Now().Add(cmp.Or(c.patience, soon)); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, int(time.Until(deadline).Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR) && time.Now().Before(deadline):
			continue
		case err != nil:
			return fmt.Errorf("poll: %w", err)
		case n == 0:
			return os.ErrDeadlineExceeded
		}
		return nil
	}
}

// dialAnswer dials for a pod and returns who answered, and the source address they saw.
func dialAnswer(p *Pod, to netip.AddrPort) (who, source string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	c, err := p.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return "", "", err
	}
	defer c.Close()
	said, err := io.ReadAll(c)
	who, source, _ = strings.Cut(string(said), " ")
	return who, source, err
}

// hammer connects to the addresses, one after the other and about once per
// millisecond, until stopped.
type hammer struct {
	t    testing.TB
	quit chan struct{}
	done chan struct{}

	mu     sync.Mutex
	counts map[string]int // by who answered; errors by their text
	total  int
}

func startHammer(t testing.TB, n *ns, to ...netip.AddrPort) *hammer {
	h := &hammer{t: t, counts: map[string]int{}, quit: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(h.done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-h.quit:
				return
			case <-tick.C:
			}
			who, _, err := client{}.connect(n, to[i%len(to)])
			if err != nil {
				who = err.Error()
			}
			h.mu.Lock()
			h.counts[who]++
			h.total++
			h.mu.Unlock()
		}
	}()
	return h
}

// await waits for so many connects more.
func (h *hammer) await(more int) {
	h.t.Helper()
	total := func() int {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.total
	}
	before := total()
	require.Eventually(h.t, func() bool { return total() >= before+more }, soon, time.Millisecond)
}

func (h *hammer) stop() map[string]int {
	close(h.quit)
	<-h.done
	h.t.Log(h.counts)
	return h.counts
}

// reusePort is what a process in the pod could try, to share a listener's port.
func reusePort(_, _ string, c syscall.RawConn) (err error) {
	if cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }); cerr != nil {
		return cerr
	}
	return err
}
