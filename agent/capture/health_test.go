package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/ebpf"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// checker checks again and again, as an agent does.
type checker struct {
	mu     sync.Mutex
	found  []Loss
	checks int
	stop   func()
}

func check(t testing.TB, m Backend) *checker {
	c := &checker{}
	quit, done := make(chan struct{}), make(chan struct{})
	c.stop = sync.OnceFunc(func() {
		close(quit)
		<-done
	})
	t.Cleanup(c.stop)
	ticker := time.NewTicker(calmInterval / 5)
	go func() {
		defer close(done)
		defer ticker.Stop()
		for {
			select {
			case <-quit:
				return
			case <-ticker.C:
			}
			found := m.Check(true)
			c.mu.Lock()
			c.found, c.checks = append(c.found, found...), c.checks+1
			c.mu.Unlock()
		}
	}()
	return c
}

// losses are those found so far.
func (c *checker) losses() []Loss {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Loss(nil), c.found...)
}

// more waits until it was checked n times more.
func (c *checker) more(t testing.TB, n int) {
	t.Helper()
	now := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.checks
	}
	until := now() + n
	require.Eventually(t, func() bool { return now() >= until }, soon, time.Millisecond)
}

// probesOf waits until n probes to the pod have begun that had not before.
func probesOf(t testing.TB, p *Pod, n int) {
	t.Helper()
	h := &p.node.health
	var last time.Time
	require.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		if began := p.status.began; began.After(last) {
			last = began
			n--
		}
		p.status.proof = nil // so that the next is due soon
		return n < 0
	}, soon, time.Millisecond)
}

// becomes waits until somebody answers the pod.
func becomes(t testing.TB, pod *ns, who string, to netip.AddrPort) {
	t.Helper()
	becomesWithin(t, soon, pod, who, to)
}

func becomesWithin(t testing.TB, within time.Duration, pod *ns, who string, to netip.AddrPort) {
	t.Helper()
	require.Eventually(t, func() bool {
		got, _, err := client{patience: 100 * time.Millisecond}.connect(pod, to)
		return err == nil && got == who
	}, within, time.Millisecond, "%s does not answer", who)
}

func ebpfConfig(t testing.TB) Config {
	cfg := byEBPF.config(t)
	cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	return cfg
}

func TestAcceptReturnsNoProbes(t *testing.T) {
	forEachBackend(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		m := w.agent(cfg)
		namespaces := []*ns{w.pod(), w.pod(), w.pod()}
		files := openFiles(t)
		var pods []*Pod
		for i, pod := range namespaces {
			p, err := m.Capture(request(m, fmt.Sprintf("00000000-0000-4000-8000-00000000000%d", i), pod))
			require.NoError(t, err)
			pods = append(pods, p)
			for _, l := range p.Listeners() {
				go func() {
					for {
						c, err := l.Accept()
						if err != nil {
							return
						}
						t.Errorf("a probe came through to the pod's listener, from %s", c.RemoteAddr())
						c.Close()
					}
				}()
			}
		}
		c := check(t, m)
		for _, p := range pods {
			probesOf(t, p, 3)
		}
		c.more(t, 3)
		require.Empty(t, c.losses())
		requireHome(t)
		c.stop()
		require.NoError(t, pods[0].Abandon())
		for _, p := range pods {
			require.NoError(t, p.Release())
		}
		require.Empty(t, m.Check(true), "with probes under way that are nobody's now")
		require.NoError(t, m.Close())
		require.Eventually(t, func() bool { return openFiles(t) <= files }, soon, time.Millisecond, "descriptors are left")
	})
}

func openFiles(t testing.TB) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(files)
}

// detach ends what pinned links of these names do.
func detach(t testing.TB, cfg Config, names ...string) {
	t.Helper()
	for _, name := range names {
		l, err := link.LoadPinnedLink(filepath.Join(cfg.PinDir, "v3", name), nil)
		require.NoError(t, err)
		require.NoError(t, l.Detach())
		require.NoError(t, l.Close())
	}
}

func TestFailOpenPodsGoDirectWithoutChecks(t *testing.T) {
	cfg := ebpfConfig(t)
	w := newWorld(t)
	open, closed := w.pod(), w.pod()
	m := w.agent(cfg)
	captured(t, m, "00000000-0000-4000-8000-000000000001", closed, "mesh")
	r := request(m, uid, open)
	r.FailOpen = true
	p := capturedBy(t, m, r, "mesh")

	h := startHammer(t, closed, listed...)
	c := check(t, m)
	becomes(t, open, "mesh", service4)
	c.stop()
	stopped := signOfLife(t, m)
	becomes(t, open, "direct", service4)
	t.Log("direct after", time.Since(stopped))
	require.Greater(t, time.Since(stopped), 1500*time.Millisecond)

	w.quiet()
	require.NoError(t, m.SetDestinations(append(listed, quiet4), nil))
	around := connectStranger(t, open, "", "4", quiet4)
	c = check(t, m)
	becomes(t, open, "mesh", service4)
	around.requireAborted()

	require.NoError(t, p.SetFailOpen(false))
	c.stop()
	closedHammer := startHammer(t, open, service4, service6)
	time.Sleep(2500 * time.Millisecond)
	require.Len(t, closedHammer.stop(), 1, "not open any more")
	counts := h.stop()
	require.Len(t, counts, 1)
	require.NotZero(t, counts["mesh"])

	require.NoError(t, p.SetFailOpen(true))
	require.NoError(t, m.Close())
	becomes(t, open, "direct", service6)
	_, _, err := client{}.connect(closed, service4)
	require.ErrorIs(t, err, unix.ECONNREFUSED)
}

// signOfLife returns a time before the last sign of life that the agent gives.
func signOfLife(t *testing.T, m Backend) (before time.Time) {
	t.Helper()
	require.Eventually(t, func() bool {
		before = time.Now()
		require.Empty(t, m.Check(false))
		probe := m.(*node).health.own.status.probe
		return probe != nil && probe.arrived.Load()
	}, soon, time.Millisecond)
	return before
}

// The agent runs, but does not accept the pod's connections.
func TestStalledPodGoesDirectIfItFailsOpen(t *testing.T) {
	for name, backlog := range map[string]string{"queue": "128", "full queue": "1"} {
		t.Run(name, func(t *testing.T) {
			cfg := ebpfConfig(t)
			w := newWorld(t)
			uids := []string{"00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002", "00000000-0000-4000-8000-000000000003"}
			open, closed, other := w.pod(), w.pod(), w.pod()
			m := w.agent(cfg)
			var stalled []*Pod
			for i, pod := range []*ns{open, closed, other} {
				require.NoError(t, pod.Do(func() error { return os.WriteFile("/proc/sys/net/core/somaxconn", []byte(backlog), 0) }))
				r := request(m, uids[i], pod)
				r.FailOpen = pod != closed
				p, err := m.Capture(r)
				require.NoError(t, err)
				stalled = append(stalled, p)
			}
			answer(t, "mesh", stalled[2].Listeners()...)
			c := check(t, m)
			becomes(t, other, "mesh", service4)
			start := time.Now()
			becomes(t, open, "direct", service4)
			t.Log("direct after", time.Since(start))
			becomes(t, other, "mesh", service4)
			for range 5 {
				_, _, err := client{patience: 50 * time.Millisecond}.connect(closed, service4)
				require.Error(t, err)
			}
			c.more(t, 10)
			require.Empty(t, c.losses(), "the hook is in force")

			answer(t, "mesh", append(stalled[0].Listeners(), stalled[1].Listeners()...)...)
			becomes(t, open, "mesh", service4)
			becomes(t, closed, "mesh", service4)
			c.more(t, 20)
			require.Empty(t, c.losses())
		})
	}
}

func TestAgentsAcceptEachOthersProbes(t *testing.T) {
	for _, backend := range redirections {
		t.Run(backend.name, func(t *testing.T) {
			cfg := backend.config(t)
			w := newWorld(t)
			pod := w.pod()
			first, second := w.agent(cfg), w.agent(cfg)
			p := captured(t, first, uid, pod, "first")
			files, err := p.Files()
			require.NoError(t, err)
			r := request(second, uid, pod)
			r.Files = files
			q := capturedBy(t, second, r, "second")
			checks := []*checker{check(t, first), check(t, second)}
			for _, p := range []*Pod{p, q} {
				probesOf(t, p, 5)
			}
			for _, c := range checks {
				require.Empty(t, c.losses())
			}
		})
	}
}

func TestHostNetworkPodsAreCapturedByCgroup(t *testing.T) {
	cfg := ebpfConfig(t)
	root := cfg.CgroupRoot
	w := newWorld(t)
	host := w.pod()
	m := w.agent(cfg)
	require.ErrorContains(t, m.HostNetwork(), "no process of a pod is in the unified cgroup hierarchy")
	_, err := m.Capture(Request{UID: uid, NetNS: host.Path, HostNetwork: true, Cgroup: 1})
	require.ErrorIs(t, err, ErrHostNetwork)

	pods := filepath.Join(root, "kubepods")
	ids, join := makeCgroups(t, pods, filepath.Join(pods, "pod1"), filepath.Join(pods, "pod2"), filepath.Join(pods, "pod1/container"), filepath.Join(pods, "pod2/container"))
	defer join(root)
	join(filepath.Join(pods, "pod1/container"))
	require.NoError(t, m.HostNetwork())

	p := capturedBy(t, m, Request{UID: uid, NetNS: host.Path, HostNetwork: true, Cgroup: ids[filepath.Join(pods, "pod1")], FailOpen: true}, "pod1")
	q := capturedBy(t, m, Request{UID: "00000000-0000-4000-8000-000000000002", NetNS: host.Path, HostNetwork: true, Cgroup: ids[filepath.Join(pods, "pod2")]}, "pod2")
	c := check(t, m)
	probesOf(t, p, 2)
	probesOf(t, q, 2)
	for _, to := range listed {
		becomes(t, host, "pod1", to)
		requireDirectDial(t, p, to)
	}
	join(filepath.Join(pods, "pod2/container"))
	for _, to := range listed {
		becomes(t, host, "pod2", to)
	}
	join(root)
	becomes(t, host, "direct", service4)

	// An entry that somebody removed.
	require.Empty(t, c.losses())
	require.NoError(t, m.(*node).modes[0].redirector.(*ebpf.Backend).DeletePod(bpf.ByCgroup(q.known.Cgroup)))
	require.Eventually(t, func() bool { return len(c.losses()) > 0 }, soon, time.Millisecond)
	require.NoError(t, c.losses()[0].Repair)
	join(filepath.Join(pods, "pod2/container"))
	becomes(t, host, "pod2", service4)

	// Another agent finds the port again; released, pods go direct.
	require.NoError(t, q.Release())
	becomes(t, host, "direct", service4)
	join(filepath.Join(pods, "pod1/container"))
	becomes(t, host, "pod1", service4)
	require.NoError(t, m.Sweep(func(string) bool { return false }))
	becomes(t, host, "direct", service4)
	join(root)
}

func TestOwnPodsOfExitedAgentsAreSwept(t *testing.T) {
	cfg := ebpfConfig(t)
	w := newWorld(t)
	m := w.agent(cfg)
	require.Empty(t, m.Check(true))
	r := m.(*node).modes[0].redirector.(*ebpf.Backend)
	dead := exec.Command("/bin/true")
	require.NoError(t, dead.Run())
	var uid uuid.UUID
	binary.BigEndian.PutUint32(uid[12:], uint32(dead.Process.Pid))
	require.NoError(t, r.SetPod(bpf.ByCookie(1), bpf.Pod{UID: uid, Port: 1}))

	require.NoError(t, m.Sweep(func(string) bool { return false }))
	other, err := bpf.Open(cfg.CgroupRoot, cfg.PinDir)
	require.NoError(t, err)
	defer other.Close()
	own := m.(*node).health.own.known.Cookie
	for cookie, want := range map[uint64]bool{1: false, own: true} {
		_, there, err := other.Pod(bpf.ByCookie(cookie))
		require.NoError(t, err)
		require.Equal(t, want, there)
	}
	require.NoError(t, m.Close())
	_, there, err := other.Pod(bpf.ByCookie(own))
	require.NoError(t, err)
	require.False(t, there)
}

// agentEnv makes the test's program an agent in a process of its own.
const agentEnv = "CTRLMESH_TEST_AGENT"

// agentMain captures the pods whose network namespaces it was given, the first
// of them to fail open, and checks until it is killed.
func agentMain(what string) {
	root, pins, _ := strings.Cut(what, " ")
	m, err := Open(Config{Mode: EBPF, CgroupRoot: root, PinDir: pins})
	if err == nil {
		err = m.SetDestinations(listed, nil)
	}
	for i := range 2 {
		if err != nil {
			break
		}
		var p *Pod
		if p, err = m.Capture(Request{UID: fmt.Sprintf("00000000-0000-4000-8000-00000000000%d", i), NetNS: fmt.Sprintf("/proc/self/fd/%d", 3+i), FailOpen: i == 0}); err != nil {
			break
		}
		for _, l := range p.Listeners() {
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					fmt.Fprint(c, "mesh ")
					c.Close()
				}
			}()
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for range time.Tick(calmInterval) {
		m.Check(true)
	}
}

// The others never go direct.
func TestSuspendedAgentLetsFailOpenPodsGoDirect(t *testing.T) {
	cfg := ebpfConfig(t)
	w := newWorld(t)
	open, closed := w.pod(), w.pod()
	start := func() *exec.Cmd {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), agentEnv+"="+cfg.CgroupRoot+" "+cfg.PinDir)
		cmd.ExtraFiles = []*os.File{open.File, closed.File}
		cmd.Stderr = os.Stderr
		require.NoError(t, cmd.Start())
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		return cmd
	}
	agent := start()
	becomes(t, open, "mesh", service4)
	becomes(t, closed, "mesh", service4)
	h := startHammer(t, closed, listed...)

	require.NoError(t, agent.Process.Signal(unix.SIGSTOP))
	stopped := time.Now()
	becomes(t, open, "direct", service4)
	t.Log("stopped: direct after", time.Since(stopped))
	becomes(t, open, "direct", service6)
	require.NoError(t, agent.Process.Signal(unix.SIGCONT))
	becomes(t, open, "mesh", service4)

	require.NoError(t, agent.Process.Kill())
	_ = agent.Wait()
	killed := time.Now()
	becomes(t, open, "direct", service4)
	t.Log("killed: direct after", time.Since(killed))
	_, _, err := client{}.connect(closed, service6)
	require.ErrorIs(t, err, unix.ECONNREFUSED)

	start()
	becomes(t, open, "mesh", service4)
	becomes(t, closed, "mesh", service6)
	require.NotContains(t, h.stop(), "direct")
}

func TestSignOfLifeRepairsNothing(t *testing.T) {
	cfg := ebpfConfig(t)
	w := newWorld(t)
	pod := w.pod()
	m := w.agent(cfg)
	r := request(m, uid, pod)
	r.FailOpen = true
	p := capturedBy(t, m, r, "mesh")
	require.NoError(t, m.(*node).modes[0].redirector.(*ebpf.Backend).SetPod(bpf.ByCookie(p.known.Cookie), bpf.Pod{UID: p.known.UID, Port: 1, Open: true}))
	for start := time.Now(); time.Since(start) < 2*rotation; time.Sleep(calmInterval / 5) {
		require.Empty(t, m.Check(false))
	}
	entry, _, err := m.(*node).modes[0].redirector.(*ebpf.Backend).Pod(bpf.ByCookie(p.known.Cookie))
	require.NoError(t, err)
	require.EqualValues(t, 1, entry.Port, "the successor's")
	before := signOfLife(t, m)
	if m.(*node).modes[0].redirector.(*ebpf.Backend).Beat() {
		require.Greater(t, time.Since(before), stallAfter, "it showed no sign of life")
	}
}

func TestLapseOfTheSignOfLifeIsReported(t *testing.T) {
	cfg := ebpfConfig(t)
	lapses := 0
	cfg.Lapsed = func() { lapses++ }
	w := newWorld(t)
	m := w.agent(cfg)
	await := func(n int) {
		for start := time.Now(); lapses < n && time.Since(start) < soon; time.Sleep(calmInterval / 5) {
			m.Check(true)
		}
		require.Equal(t, n, lapses)
	}
	await(1) // there was no agent before
	time.Sleep(stallAfter + calmInterval)
	await(2)
}

// seen is a redirector that has only State.
type seen struct {
	redirector
	state uint32
	known bool
}

func (s seen) State(redirect.Pod) (uint32, bool) { return s.state, s.known }

// What each pod's redirection is like, and whether probes that arrive prove it for long.
func TestProvenPodsAreProbedSeldom(t *testing.T) {
	n := &node{rotation: rotation, pods: map[string]*Pod{}}
	proven := map[*Pod]bool{}
	add := func(s seen, proves bool, change func(*status)) {
		for range 4 {
			p := &Pod{node: n, redirector: s}
			if change(&p.status); s.known {
				p.status.proof = new(uint32(7))
			}
			n.pods[strconv.Itoa(len(proven))], proven[p] = p, proves
		}
	}
	add(seen{state: 7, known: true}, true, func(*status) {})
	add(seen{state: 7, known: false}, false, func(*status) {})
	add(seen{state: 8, known: true}, false, func(*status) {})
	add(seen{state: 7, known: true}, false, func(s *status) { s.reason = errors.New("it was lost") })
	add(seen{state: 7, known: true}, false, func(s *status) { s.damage = errors.New("it is damaged") })
	pods := slices.Collect(maps.Keys(proven))
	h, probes, now := &health{node: n}, map[*Pod]int{}, time.Now()
	for range 2 * provenRotations * int(rotation/calmInterval) {
		now = now.Add(calmInterval)
		for _, p := range h.due(pods, now) {
			p.status.began = now
			probes[p]++
		}
	}
	for p, proves := range proven {
		if proves {
			require.InDelta(t, 2, probes[p], 1)
		} else {
			require.GreaterOrEqual(t, probes[p], 2*provenRotations)
		}
	}
}
