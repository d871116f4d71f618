package netns_test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/internal/netnstest"
)

// A change of the rules in a network namespace is noticed, also after more of them than the kernel keeps messages of.
func TestChangesOfRulesAreNoticed(t *testing.T) {
	n := netnstest.New(t)
	rules, err := netns.OpenRules(n.File)
	require.NoError(t, err)
	defer rules.Close()
	run := func(n *netnstest.NS, commands string) {
		require.NoError(t, n.Do(func() error { return exec.Command("nft", commands).Run() }))
	}
	last := uint32(0)
	changed := func() bool {
		var changed bool
		for {
			now, err := rules.Changes()
			require.NoError(t, err)
			if now == last {
				return changed
			}
			last, changed = now, true
		}
	}
	require.False(t, changed())

	run(n, "add table ip t")
	require.True(t, changed())
	require.False(t, changed())

	var chains strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&chains, "add chain ip t c%d; ", i)
	}
	run(n, chains.String())
	require.True(t, changed())
	require.False(t, changed())

	run(n, "delete chain ip t c7")
	require.True(t, changed(), "after messages were lost")
	require.False(t, changed())

	run(netnstest.New(t), "add table ip t")
	require.False(t, changed(), "of another network namespace")
}
