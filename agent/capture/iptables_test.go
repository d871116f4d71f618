package capture

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
)

func TestListingOfFilledChainIsBounded(t *testing.T) {
	cfg := iptablesConfig(t)
	w := newWorld(t)
	pod := w.pod()
	p := captured(t, w.agent(cfg), uid, pod, "mesh")
	var listing strings.Builder
	listing.WriteString("*nat\n")
	for i := range 2000 {
		fmt.Fprintf(&listing, "-A %s -d 10.0.%d.%d/32 -p tcp -m tcp --dport 1 -j ACCEPT\n", iptables.Chain, i>>8, i&255)
	}
	listing.WriteString("COMMIT\n")
	fill := exec.Command("iptables-restore", "--noflush")
	fill.Stdin = strings.NewReader(listing.String())
	require.NoError(t, pod.Do(fill.Run))

	table := p.redirector.(*iptables.Backend).Tables[0]
	require.ErrorContains(t, pod.Do(func() error {
		_, err := table.Lead(t.Context())
		return err
	}), "exit status 125")
	require.Error(t, pod.Do(func() error {
		_, err := table.Left(t.Context())
		return err
	}))
	require.ErrorContains(t, p.Release(), "exit status 125", "the rules may be another agent's")
	require.NoError(t, Cleanup(cfg.PinDir, pod.Path), "by any agent")
	require.NoError(t, pod.Do(func() error {
		require.False(t, table.MayExist(), "the chain still exists")
		return nil
	}))
}

func TestDamagedRulesAreRepaired(t *testing.T) {
	with(t, byIPTables, func(t *testing.T, cfg Config) { // only mode IPTables has rules
		w := newWorld(t)
		pod := w.pod()
		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		tables := p.redirector.(*iptables.Backend).Tables
		damage := func(rules string) func(iptables.Table) error {
			return func(table iptables.Table) error { return table.Restore(t.Context(), "*nat\n"+rules+"\nCOMMIT\n") }
		}
		state := func() uint32 {
			state, known := p.redirector.State(p.target())
			require.True(t, known)
			return state
		}
		for name, damage := range map[string]func(iptables.Table) error{
			"chain flushed":  damage("-F " + iptables.Chain),
			"OUTPUT flushed": damage("-F OUTPUT"),
			"all removed":    func(table iptables.Table) error { return table.Remove(t.Context(), 0, nil) },
			"jump not first": damage("-I OUTPUT 1 -p tcp -j ACCEPT"),
			"narrow jump":    damage("-R OUTPUT 1 -p udp -j " + iptables.Chain),
			"jumps doubled":  damage("-I OUTPUT 1 -j " + iptables.Chain),
			"a rule added":   damage("-I " + iptables.Chain + " 1 -p tcp -j ACCEPT"),
			"rules reversed": damage("-A " + iptables.Chain + " " + fmt.Sprintf("-m mark --mark %#x -j RETURN", iptables.Mark)),
		} {
			t.Run(name, func(t *testing.T) {
				before := state()
				require.Equal(t, before, state(), "nothing has changed")
				for _, table := range tables {
					require.NoError(t, pod.Do(func() error { return damage(table) }))
				}
				require.NotEqual(t, before, state(), "a probe is due")
				kept := p.target()
				kept.Left = new(p.redirector.Left(t.Context(), kept))
				require.NoError(t, p.redirector.Apply(t.Context(), kept))
				for _, to := range listed {
					requireAnswer(t, pod, client{}, to, "mesh", "")
				}
				before = state()
				kept.Left = new(p.redirector.Left(t.Context(), kept))
				require.NoError(t, p.redirector.Apply(t.Context(), kept))
				require.Equal(t, before, state(), "rules that look right are kept")
				require.NoError(t, p.redirector.Apply(t.Context(), p.target()))
				require.NotEqual(t, before, state(), "not by a repair: they may only look right")
				for _, table := range tables {
					require.NoError(t, pod.Do(func() error {
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

// An agent that starts writes no rule again that looks right.
func TestRulesOfAnEarlierAgentAreKept(t *testing.T) {
	with(t, byIPTables, func(t *testing.T, cfg Config) { // only mode IPTables has rules
		w := newWorld(t)
		pod := w.pod()
		state := func(p *Pod) uint32 {
			state, known := p.redirector.State(p.target())
			require.True(t, known)
			return state
		}
		earlier := captured(t, w.agent(cfg), uid, pod, "mesh")
		setEgress(t, earlier, "egress", egressPorts...)
		before := state(earlier)
		require.NoError(t, earlier.Abandon())

		p := captured(t, w.agent(cfg), uid, pod, "mesh")
		setEgress(t, p, "egress", egressPorts...)
		require.Equal(t, before, state(p))
		for _, to := range listed {
			requireAnswer(t, pod, client{}, to, "mesh", "")
		}
		requireAnswer(t, pod, client{}, other4, "egress", other4.String())
		requireDatagrams(t, pod, true, other4)
	})
}

func TestDuplicateJumpsAreRemoved(t *testing.T) {
	with(t, byIPTables, func(t *testing.T, cfg Config) { // only mode IPTables has rules
		for _, jumps := range []int{0, 1, 2, 5} {
			w := newWorld(t)
			pod := w.pod()
			p := captured(t, w.agent(cfg), uid, pod, "mesh")
			for _, table := range p.redirector.(*iptables.Backend).Tables {
				require.NoError(t, pod.Do(func() error {
					return table.Restore(t.Context(), "*nat\n-F OUTPUT\n"+strings.Repeat("-A OUTPUT -j "+iptables.Chain+"\n", jumps)+"COMMIT\n")
				}))
			}
			require.NoError(t, p.Release())
			for _, to := range listed {
				requireAnswer(t, pod, client{}, to, "direct", "")
			}
		}
	})
}
