package capture

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/ebpf"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
	"github.com/ctrlmesh/ctrlmesh/bpf"
)

// Connections to the apiserver still arrive.
func TestLostEgressIsRepaired(t *testing.T) {
	byOther := func(damage func(r *bpf.Redirect, p *Pod) error) func(*testing.T, Config, *Pod, *ns) {
		return func(t *testing.T, cfg Config, p *Pod, _ *ns) {
			r, err := bpf.Open(cfg.CgroupRoot, cfg.PinDir)
			require.NoError(t, err)
			require.NoError(t, errors.Join(damage(r, p), r.Close()))
		}
	}
	run := func(args ...string) func(*testing.T, Config, *Pod, *ns) {
		return func(t *testing.T, cfg Config, _ *Pod, pod *ns) {
			for _, program := range []string{"iptables", "ip6tables"} {
				require.NoError(t, pod.Do(exec.Command(program, args...).Run))
			}
		}
	}
	for name, test := range map[string]struct {
		mode   Mode
		damage func(*testing.T, Config, *Pod, *ns)
	}{
		"entry": {EBPF, byOther(func(r *bpf.Redirect, p *Pod) error {
			return r.SetPod(bpf.ByCookie(p.known.Cookie), bpf.Pod{UID: p.known.UID, Port: p.known.Port})
		})},
		"ports":          {EBPF, byOther(func(r *bpf.Redirect, p *Pod) error { return r.SetEgress(p.known.UID, nil, nil) })},
		"filter flushed": {IPTables, run("-F")},
		"nat flushed":    {IPTables, run("-t", "nat", "-F")},
	} {
		t.Run(name, func(t *testing.T) {
			forEachRedirection(t, func(t *testing.T, cfg Config) {
				if cfg.Mode != test.mode {
					t.Skipf("damages what only mode %s has", test.mode)
				}
				w := newWorld(t)
				pod := w.pod()
				m := w.agent(cfg)
				p := captured(t, m, uid, pod, "mesh")
				setEgress(t, p, "egress", 6443)
				c := check(t, m)
				probesOf(t, p, 2)
				require.Empty(t, c.losses())
				test.damage(t, cfg, p, pod)
				require.Eventually(t, func() bool { return len(c.losses()) > 0 }, soon, time.Millisecond)
				becomes(t, pod, "egress", other4)
				require.Eventually(t, func() bool {
					return errors.Is(datagram(pod, other4, false), unix.EPERM)
				}, soon, time.Millisecond)
				require.Eventually(t, func() bool {
					losses := c.losses()
					return losses[len(losses)-1].Repair == nil
				}, soon, time.Millisecond, "the repair is reported")
			})
		})
	}
}

func TestLossesAreRepaired(t *testing.T) {
	// by another process, which shares the maps
	byOther := func(damage func(t *testing.T, r *bpf.Redirect, p *Pod)) func(*testing.T, Config, *Pod, *ns) {
		return func(t *testing.T, cfg Config, p *Pod, _ *ns) {
			r, err := bpf.Open(cfg.CgroupRoot, cfg.PinDir)
			require.NoError(t, err)
			damage(t, r, p)
			require.NoError(t, r.Close())
		}
	}
	flush := func(t *testing.T, cfg Config, _ *Pod, pod *ns) {
		for _, program := range []string{"iptables", "ip6tables"} {
			require.NoError(t, pod.Do(exec.Command(program, "-t", "nat", "-F").Run))
		}
	}
	ofNode, ofPod := true, false
	for _, test := range []struct {
		name   string
		mode   Mode
		ofNode bool
		damage func(*testing.T, Config, *Pod, *ns)
	}{
		{"links detached", EBPF, ofNode, func(t *testing.T, cfg Config, _ *Pod, _ *ns) {
			detach(t, cfg, "connect4", "connect6")
		}},
		{"pins removed", EBPF, ofNode, func(t *testing.T, cfg Config, _ *Pod, _ *ns) {
			require.NoError(t, os.RemoveAll(cfg.PinDir))
		}},
		{"everything removed", EBPF, ofNode, func(t *testing.T, cfg Config, _ *Pod, _ *ns) {
			require.NoError(t, bpf.Remove(cfg.PinDir))
		}},
		{"entry removed", EBPF, ofPod, byOther(func(t *testing.T, r *bpf.Redirect, p *Pod) {
			require.NoError(t, r.DeletePod(bpf.ByCookie(p.known.Cookie)))
		})},
		{"destinations removed", EBPF, ofNode, byOther(func(t *testing.T, r *bpf.Redirect, _ *Pod) {
			require.NoError(t, r.SetDestinations(nil))
		})},
		{"rules flushed", IPTables, ofPod, flush},
	} {
		for _, m := range backends {
			if !strings.HasPrefix(m.name, string(test.mode)) {
				continue
			}
			t.Run(test.name+"/"+m.name, func(t *testing.T) {
				cfg := m.config(t)
				cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
				w := newWorld(t)
				pod := w.pod()
				agent := w.agent(cfg)
				p := captured(t, agent, uid, pod, "mesh")
				for i := range 5 {
					captured(t, agent, fmt.Sprintf("00000000-0000-4000-8000-00000000000%d", i), w.pod(), "mesh")
				}
				c := check(t, agent)
				probesOf(t, p, 1)
				require.Empty(t, c.losses())

				test.damage(t, cfg, p, pod)
				damaged := time.Now()
				require.Eventually(t, func() bool { return len(c.losses()) > 0 }, soon, time.Millisecond)
				t.Log("noticed after", time.Since(damaged), c.losses())
				becomes(t, pod, "mesh", service4)
				becomes(t, pod, "mesh", service6)
				probesOf(t, p, 2)
				c.more(t, 2)
				losses := c.losses()
				for _, loss := range losses {
					require.Equal(t, test.mode, loss.Mode)
					require.Error(t, loss.Reason)
					require.NoError(t, loss.Repair)
				}
				require.Len(t, losses, 1, "found once, repaired once")
				if test.ofNode {
					require.Empty(t, losses[0].UID)
				} else {
					require.Equal(t, uid, losses[0].UID)
				}
			})
		}
	}
}

// They fail by what was repaired meanwhile.
func TestProbesBeforeARepairAreNoLoss(t *testing.T) {
	for _, by := range []string{"the audit", "the agent's own pod"} {
		t.Run(by, func(t *testing.T) {
			cfg := ebpfConfig(t)
			w := newWorld(t)
			agent := w.agent(cfg)
			p := &captured(t, agent, uid, w.pod(), "mesh").status
			n := agent.(*node)
			n.rotation = time.Hour // audits are when the test wants one
			own := func() *status { return &n.health.own.status }
			healthy := func() bool { return own().probe == nil && own().failed == 0 && p.failed == 0 }
			until := func(done func() bool) (losses []Loss) {
				t.Helper()
				for start := time.Now(); !done(); time.Sleep(time.Millisecond) {
					require.Less(t, time.Since(start), soon)
					losses = append(losses, agent.Check(true)...)
				}
				return losses
			}
			require.Empty(t, until(func() bool { return n.health.own != nil && !p.began.IsZero() && healthy() }))
			n.health.audited = time.Now()

			detach(t, cfg, "connect4")
			damaged := time.Now()
			p.began = time.Time{} // its probe is due
			losses := until(func() bool {
				if own().failed == attempts-1 && p.began.After(damaged) {
					return true
				}
				own().failed = 0 // it has not found out yet
				return false
			})
			if by == "the audit" {
				n.health.audited = time.Time{} // before the own pod's next probe is examined, but after it began
			}
			p.failed = attempts - 1 // as if its last probe had failed; this one waits for an answer yet
			losses = append(losses, agent.Check(true)...)
			losses = append(losses, until(healthy)...)
			require.Len(t, losses, 1, "found once, repaired once")
			require.Empty(t, losses[0].UID)
		})
	}
}

func TestRepairsHideNoLossOfAPod(t *testing.T) {
	cfg := ebpfConfig(t)
	w := newWorld(t)
	pod := w.pod()
	agent := w.agent(cfg)
	p := captured(t, agent, uid, pod, "mesh")
	n := agent.(*node)
	require.NoError(t, n.modes[0].redirector.(*ebpf.Backend).DeletePod(bpf.ByCookie(p.known.Cookie)))
	for start, found := time.Now(), false; !found; time.Sleep(20 * time.Millisecond) {
		require.Less(t, time.Since(start), soon)
		detach(t, cfg, "connect4")
		n.health.audited = time.Time{}
		agent.Check(true)
		var err error
		_, found, err = n.modes[0].redirector.(*ebpf.Backend).Pod(bpf.ByCookie(p.known.Cookie))
		require.NoError(t, err)
	}
}

func TestPodWithFullTablesDelaysNoOther(t *testing.T) {
	with(t, byIPTables, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		hostile, pod := w.pod(), w.pod()
		agent := w.agent(cfg)
		captured(t, agent, uid, hostile, "mesh")
		other := captured(t, agent, "00000000-0000-4000-8000-000000000001", pod, "mesh")
		c := check(t, agent)
		probesOf(t, other, 1)

		var rules strings.Builder
		rules.WriteString("*nat\n-F " + iptables.Chain + "\n-F OUTPUT\n")
		for i := range 60000 {
			fmt.Fprintf(&rules, "-A OUTPUT -d 10.%d.%d.%d/32 -p tcp -m tcp --dport 1 -j ACCEPT\n", i>>16, i>>8&255, i&255)
		}
		rules.WriteString("COMMIT\n")
		fill := exec.Command("iptables-restore", "--noflush")
		fill.Stdin = strings.NewReader(rules.String())
		require.NoError(t, hostile.Do(fill.Run))
		becomes(t, hostile, "direct", service4)

		looks, looked := 0, time.Time{} // at the other pod, while this one is repaired
		for lost := true; lost; time.Sleep(time.Millisecond) {
			n := agent.(*node)
			n.mu.Lock()
			p := n.pods[uid]
			if last := other.status.looked; p.repair != nil && last != looked {
				looks, looked = looks+1, last
			}
			lost = p.status.repairs == 0
			n.mu.Unlock()
		}
		t.Log("looks at the other pod meanwhile:", looks)
		require.Greater(t, looks, 1, "the other pod was not checked meanwhile")
		becomes(t, hostile, "mesh", service4)
		require.Eventually(t, func() bool { return len(c.losses()) > 0 }, soon, time.Millisecond)
		for _, loss := range c.losses() {
			require.Equal(t, uid, loss.UID)
		}
		require.NoError(t, agent.SetDestinations(append(listed, other4), nil))
		// Commands that read full tables take seconds, and end at a limit on a busy machine.
		becomesWithin(t, 4*soon, hostile, "mesh", other4)
		start := time.Now()
		_ = agent.(*node).pods[uid].Release() // it is the pod's own doing if the rules stay
		require.Less(t, time.Since(start), soon)
	})
}

// Each check starts one repair: with many damaged pods the last would wait for long.
func TestChecksAreMoreFrequentWhileAPodIsDamaged(t *testing.T) {
	with(t, byIPTables, func(t *testing.T, cfg Config) { // the others are repaired in the check that finds them
		w := newWorld(t)
		pod := w.pod()
		m := w.agent(cfg)
		p := captured(t, m, uid, pod, "mesh")
		interval := func(want time.Duration) {
			t.Helper()
			require.Eventually(t, func() bool { return m.CheckInterval() == want }, soon, time.Millisecond)
		}
		check(t, m)
		interval(calmInterval)
		for _, table := range p.redirector.(*iptables.Backend).Tables {
			require.NoError(t, pod.Do(func() error { return table.Restore(t.Context(), "*nat\n-F OUTPUT\nCOMMIT\n") }))
		}
		interval(urgentInterval)
		interval(calmInterval)
	})
}

func TestLossIsReportedWhileRepairsFail(t *testing.T) {
	cfg := ebpfConfig(t)
	w := newWorld(t)
	pod := w.pod()
	m := w.agent(cfg)
	captured(t, m, uid, pod, "mesh")
	c := check(t, m)
	c.more(t, 2)
	require.NoError(t, unix.Mount("tmpfs", filepath.Dir(cfg.PinDir), "tmpfs", 0, "")) // where the bpffs was
	require.Eventually(t, func() bool { return len(c.losses()) > 3 }, soon, time.Millisecond)
	for _, loss := range c.losses() {
		require.ErrorContains(t, loss.Repair, "is not on a bpffs")
		require.Empty(t, loss.UID)
	}
	becomes(t, pod, "mesh", service4)
	require.NoError(t, unix.Unmount(filepath.Dir(cfg.PinDir), 0))
	require.Eventually(t, func() bool {
		before := len(c.losses())
		c.more(t, 5)
		return len(c.losses()) == before
	}, soon, time.Millisecond, "reported though it is over")
}
