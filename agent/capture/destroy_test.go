package capture

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
)

// Servers that send nothing until a test asks them to.
var (
	quiet4  = netip.MustParseAddrPort("198.19.0.4:443")
	quiet6  = netip.MustParseAddrPort("[fd00:19::4]:443")
	quiets  = []netip.AddrPort{quiet4, quiet6}
	foreign = []netip.AddrPort{netip.MustParseAddrPort("198.19.0.4:444"), netip.MustParseAddrPort("[fd00:19::4]:444")}
)

// quiet is those servers, with the connections they have.
type quiet struct {
	mu    sync.Mutex
	conns []net.Conn
}

func isQuiet(to netip.AddrPort) bool { return slices.Contains(quiets, to) }

func (w *world) quiet() *quiet {
	w.t.Helper()
	w.server.Up("lo", "198.19.0.4/32", "fd00:19::4/128")
	q := &quiet{}
	w.t.Cleanup(func() {
		for _, c := range q.conns {
			c.Close()
		}
	})
	for _, at := range append(foreign, quiets...) {
		accept(w.t, w.server.Listen("tcp", at.String()), func(c net.Conn) {
			q.mu.Lock()
			defer q.mu.Unlock()
			q.conns = append(q.conns, c)
		})
	}
	return q
}

// speak sends a byte by every connection that there was time to accept.
func (q *quiet) speak() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, c := range q.conns {
		_, _ = c.Write([]byte("x"))
	}
}

// strangerEnv makes the test's program a client in a process of its own: what a
// test connects itself would be the agent's.
const strangerEnv = "CTRLMESH_TEST_STRANGER"

// strangerMain connects, and prints what it reads and why it ends.
func strangerMain(what string) {
	family, to, _ := strings.Cut(what, " ")
	c, err := strangerConnect(family, netip.MustParseAddrPort(to))
	if err != nil {
		fmt.Println("connect", err)
		return
	}
	fmt.Println("connected")
	for buffer := make([]byte, 1); ; {
		n, err := unix.Read(c, buffer)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			var code syscall.Errno
			_ = errors.As(err, &code)
			fmt.Println(int(code))
			return
		case n == 0:
			fmt.Println("closed")
			return
		default:
			fmt.Println("read")
		}
	}
}

func strangerConnect(family string, to netip.AddrPort) (int, error) {
	f, kind, protocol := unix.AF_INET6, unix.SOCK_STREAM, 0
	switch family {
	case "udp":
		f, kind = unix.AF_INET, unix.SOCK_DGRAM
	case "4":
		f = unix.AF_INET
	case "mptcp":
		f, protocol = unix.AF_INET, unix.IPPROTO_MPTCP
	}
	fd, err := unix.Socket(f, kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return fd, err
	}
	return fd, unix.Connect(fd, sockaddr(to, f))
}

type stranger struct {
	t     *testing.T
	lines chan string
}

// connectStranger starts a client in the pod, as one of a cgroup unless that is "".
func connectStranger(t *testing.T, pod *ns, cgroup, family string, to netip.AddrPort) *stranger {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), strangerEnv+"="+family+" "+to.String())
	cmd.Stderr = os.Stderr
	if cgroup != "" {
		dir, err := os.Open(cgroup)
		require.NoError(t, err)
		defer dir.Close()
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	}
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, pod.Do(cmd.Start))
	s := &stranger{t: t, lines: make(chan string, 100)}
	go func() {
		defer close(s.lines)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			s.lines <- lines.Text()
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	require.Equal(t, "connected", s.said())
	return s
}

func (s *stranger) said() string {
	s.t.Helper()
	select {
	case line := <-s.lines:
		return line
	case <-time.After(soon):
		s.t.Fatal("a client is silent")
		return ""
	}
}

// requireAborted requires that its connection ended as one that was destroyed does.
func (s *stranger) requireAborted() {
	s.t.Helper()
	require.Equal(s.t, strconv.Itoa(int(unix.ECONNABORTED)), s.said())
}

// requireOpen requires that it still hears its server.
func (s *stranger) requireOpen(q *quiet) {
	s.t.Helper()
	require.Eventually(s.t, func() bool {
		q.speak()
		select {
		case line := <-s.lines:
			require.Equal(s.t, "read", line)
			return true
		case <-time.After(10 * time.Millisecond):
			return false
		}
	}, soon, time.Millisecond)
}

func TestDirectConnectionsEndWithTheCapture(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod, q := w.pod(), w.quiet()
		stay := []*stranger{connectStranger(t, pod, "", "4", foreign[0]), connectStranger(t, pod, "", "6", foreign[1])}
		gone := []*stranger{
			connectStranger(t, pod, "", "4", quiet4), connectStranger(t, pod, "", "6", quiet6),
			connectStranger(t, pod, "", "mapped", quiet4),
		}
		m := w.agent(cfg)
		require.NoError(t, m.SetDestinations(quiets, agents))
		p, err := m.Capture(request(m, uid, pod))
		require.NoError(t, err)
		if cfg.Mode == Address {
			stay, gone = append(stay, gone...), nil // no way around the agent is closed to it
		}
		for _, s := range gone {
			s.requireAborted()
		}

		// What the agent itself connects, lives.
		own, err := p.DialContext(t.Context(), "tcp", quiet4.String())
		require.NoError(t, err)
		defer own.Close()
		p.node.mu.Lock()
		if cfg.Mode != Address {
			p.node.destroyDirect(p.node.destinations, nil, p)
		}
		p.node.mu.Unlock()
		require.Eventually(t, func() bool {
			q.speak()
			require.NoError(t, own.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
			_, err := own.Read(make([]byte, 1))
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				require.NoError(t, err)
			}
			return err == nil
		}, soon, time.Millisecond)
		for _, s := range stay {
			s.requireOpen(q)
		}
	})
}

func TestNextAgentEndsDirectConnections(t *testing.T) {
	for name, test := range map[string]struct{ failOpen, handed, destroyed bool }{
		"closed":                  {false, false, false},
		"fails open":              {true, false, true},
		"closed, handed over":     {false, true, false},
		"fails open, handed over": {true, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			pod, q := w.pod(), w.quiet()
			cfg := iptablesConfig(t)
			first, second := agent(t, cfg), agent(t, cfg)
			p, err := first.Capture(request(first, uid, pod))
			require.NoError(t, err)
			s := connectStranger(t, pod, "", "4", quiet4) // the first agent does not redirect that
			require.NoError(t, second.SetDestinations(quiets, nil))
			r := request(second, uid, pod)
			r.FailOpen = test.failOpen
			if test.handed {
				r.Files, err = p.Files()
				require.NoError(t, err)
			}
			_, err = second.Capture(r)
			require.NoError(t, err)
			if test.destroyed {
				s.requireAborted()
			} else {
				s.requireOpen(q)
			}
		})
	}
}

// The pod fails open while the agent gives no sign of life.
func TestConnectionsOfALapseEnd(t *testing.T) {
	with(t, byEBPF, func(t *testing.T, cfg Config) { // only mode EBPF lets connections go direct during a lapse
		w := newWorld(t)
		pod, q := w.pod(), w.quiet()
		m := w.agent(cfg)
		require.NoError(t, m.SetDestinations(append(quiets, listed...), nil))
		r := request(m, uid, pod)
		r.FailOpen = true
		capturedBy(t, m, r, "mesh")
		reaches := func(who string, check func()) {
			require.Eventually(t, func() bool {
				check()
				got, _, err := client{}.connect(pod, service4)
				require.NoError(t, err)
				return got == who
			}, soon, 20*time.Millisecond)
		}
		check := func() { m.Check(true) }
		reaches("mesh", check)
		reaches("direct", func() {})
		s := connectStranger(t, pod, "", "4", quiet4)
		s.requireOpen(q)
		reaches("mesh", check)
		s.requireAborted()
	})
}

// podCgroup makes a pod's cgroup with a container's in it.
func podCgroup(t *testing.T, root string) (id uint64, container string) {
	t.Helper()
	inside := filepath.Join(root, "pod")
	container = filepath.Join(inside, "container")
	for _, dir := range []string{inside, container} {
		bpftest.MakeCgroup(t, dir)
	}
	var st unix.Stat_t
	require.NoError(t, unix.Stat(inside, &st))
	return st.Ino, container
}

// They are in the pod's network namespace, and are not this process's.
func TestConnectionsOfAnotherAgentContinue(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) { // mode Address ends no connections of a pod
		cfg.CgroupRoot = bpftest.Cgroup(t)
		id, container := podCgroup(t, cfg.CgroupRoot)
		w := newWorld(t)
		pod, q := w.pod(), w.quiet()
		mine, agents := connectStranger(t, pod, container, "4", quiet4), connectStranger(t, pod, "", "4", quiet4)
		m := w.agent(cfg)
		require.NoError(t, m.SetDestinations(quiets, nil))
		r := request(m, uid, pod)
		r.Cgroup = id
		_, err := m.Capture(r)
		require.NoError(t, err)
		mine.requireAborted()
		agents.requireOpen(q)
	})
}

// The pod fails open, and neither agent gives a sign of life for a while.
func TestDirectConnectionsOfATakeoverEnd(t *testing.T) {
	for name, gap := range map[string]bool{"gap": true, "no gap": false} {
		t.Run(name, func(t *testing.T) {
			cfg := ebpfConfig(t)
			id, container := podCgroup(t, cfg.CgroupRoot)
			w := newWorld(t)
			pod, q := w.pod(), w.quiet()
			first := w.agent(cfg)
			r := request(first, uid, pod)
			r.Cgroup, r.FailOpen = id, true
			p := capturedBy(t, first, r, "mesh")
			beating := check(t, first)
			becomes(t, pod, "mesh", service4)
			mine, agents := connectStranger(t, pod, container, "4", quiet4), connectStranger(t, pod, "", "4", quiet4)
			if gap {
				beating.stop()
				becomes(t, pod, "direct", service4)
			}
			second := w.agent(cfg)
			require.NoError(t, second.SetDestinations(append(quiets, listed...), nil))
			var err error
			r.Files, err = p.Files()
			require.NoError(t, err)
			p = capturedBy(t, second, r, "mesh")
			c := check(t, second)
			probesOf(t, p, 2)
			c.more(t, 2)
			if gap {
				mine.requireAborted()
			} else {
				mine.requireOpen(q)
			}
			agents.requireOpen(q)
		})
	}
}

// The pods share a network namespace.
func TestOtherPodsConnectionsContinue(t *testing.T) {
	root := bpftest.Cgroup(t)
	w := newWorld(t)
	pod, q := w.pod(), w.quiet()
	id, container := podCgroup(t, root)
	t.Run("clients", func(t *testing.T) { // whose cgroups outlive them
		mine := connectStranger(t, pod, container, "4", quiet4)
		theirs := connectStranger(t, pod, "", "4", quiet4)
		only := func(id uint64) func() (map[uint64]bool, error) {
			return func() (map[uint64]bool, error) { return cgroupsBelow(root, map[uint64]bool{id: true}) }
		}
		direct := search{netns: pod.File, shared: true, protocols: []uint8{unix.IPPROTO_TCP}, isDirect: isQuiet, cgroups: only(1 << 40)}
		destroyed, _, err := direct.destroy()
		require.NoError(t, err)
		require.Zero(t, destroyed, "of a pod that is gone")
		direct.cgroups = only(id)
		destroyed, _, err = direct.destroy()
		require.NoError(t, err)
		require.Equal(t, 1, destroyed)
		mine.requireAborted()
		theirs.requireOpen(q)
	})
}

// The agent before had no listener of the pod.
func TestDirectConnectionsEndWithoutInheritedListeners(t *testing.T) {
	w := newWorld(t)
	pod := w.pod()
	w.quiet()
	s := connectStranger(t, pod, "", "4", quiet4)
	m := w.agent(iptablesConfig(t))
	require.NoError(t, m.SetDestinations(quiets, nil))
	r := request(m, uid, pod)
	r.Files = &Files{}
	_, err := m.Capture(r)
	require.NoError(t, err)
	s.requireAborted()
}
